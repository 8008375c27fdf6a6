"""Other plugins, early imports and reloads, in every order: right numbers or one loud error."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

import megatron_dynbatch
from tests.hooks import toy_plugin
from tests.hooks.toy_plugin import TRAINING
from tests.parity.job import NOTES, Cell, run_cell
from tests.parity.reference import Recipe
from tests.parity.rollouts import batch_flags

pytestmark = pytest.mark.slow

SITES = ("train", "train_step", "training_log")
SEAMS = ("get_forward_backward_func", "build_train_valid_test_data_iterators")
CORE = "megatron.core.num_microbatches_calculator"


def note_calls() -> None:
    NOTES.append(toy_plugin.CALLS)


def in_order(*steps: Callable[[], Any]) -> None:
    """Do these things, then let the training begin."""
    note_calls()
    for step in steps:
        step()


def install() -> None:
    megatron_dynbatch.install()


def uninstall() -> None:
    megatron_dynbatch.uninstall()


def import_early() -> None:
    # As a script does before it knows of any plugin.
    from megatron.training import pretrain, training  # noqa: F401
    from megatron.training.training import train, train_step, training_log

    NOTES.append([function.__name__ for function in (train, train_step, training_log)])


def reload_training() -> None:
    importlib.reload(importlib.import_module(TRAINING))


def wrap_pretrain() -> None:
    toy_plugin.wrap("pretrain", module="megatron.training")


# The test job itself looks at the signatures of train and training_log.
sites = partial(toy_plugin.wrap, "train_step")
declared = partial(toy_plugin.wrap, *SITES, *SEAMS, declared=True)
seams = partial(toy_plugin.wrap, *SEAMS)
calculator = partial(toy_plugin.wrap, "_build_num_microbatches_calculator", module=CORE)
objects = partial(toy_plugin.wrap_in_objects, "train_step", *SEAMS)
variable = toy_plugin.keep_in_variable
restore = toy_plugin.put_back

# What each order does, and which of the other plugin's wrappers must have been called. Nobody's
# data are built where the rollouts take their place.
RIGHT: dict[str, tuple[tuple[Callable[[], Any], ...], set[str]]] = {
    "names imported before": ((import_early, install), set()),
    "names imported after": ((install, import_early), set()),
    "closures before": ((sites, install), {"train_step"}),
    "closures after": ((install, sites), {"train_step"}),
    "declared wrappers before": ((declared, install), {"train_step", SEAMS[0]}),
    "declared wrappers after": ((install, declared), {"train_step", SEAMS[0], SEAMS[1]}),
    "objects before": ((objects, install), {"train_step", SEAMS[0]}),
    "objects after": ((install, objects), {"train_step", SEAMS[0]}),
    "module variable before": ((variable, install), {"train_step"}),
    "module variable after": ((install, variable), {"train_step"}),
    "seams and calculator before": ((seams, calculator, install), {SEAMS[0]}),
    "seams and calculator after": ((install, seams, calculator), set(SEAMS)),
    "wrapped on both sides": ((variable, install, declared), {"train_step"}),
    "pretrain wrapped before": ((wrap_pretrain, install), {"pretrain"}),
    "pretrain wrapped after": ((install, wrap_pretrain), {"pretrain"}),
    "reloaded before": ((import_early, reload_training, install), set()),
    "reloaded, then installed again": ((install, reload_training, install), set()),
    "sites wrapped before, put back after": ((sites, install, restore), set()),
    "off and on again inside wrappers": (
        (install, sites, seams, uninstall, install),
        {"train_step", SEAMS[0]},
    ),
    "off and on again outside wrappers": (
        (sites, seams, install, uninstall, install),
        {"train_step", SEAMS[0]},
    ),
}

WRONG: dict[str, tuple[tuple[Callable[[], Any], ...], str]] = {
    "replaced before": (
        (partial(toy_plugin.replace, "train_step"), install),
        r"training\.train_step was replaced by tests\.hooks\.toy_plugin\.replace.*"
        r"toy_plugin\.py:\d+\), which does not call the original",
    ),
    "replaced after": (
        (install, partial(toy_plugin.replace, "train_step")),
        r"hooks were lost after megatron_dynbatch\.install\(\):\s+megatron\.training\.training\."
        r"train_step was replaced by tests\.hooks\.toy_plugin\.replace",
    ),
    "reloaded after": (
        (install, reload_training),
        r"train_step is not the function that was hooked: its module was loaded again",
    ),
    "a seam put back to what it was": (
        (seams, install, restore),
        r"get_forward_backward_func lost its hook.*megatron\.core\.pipeline_parallel\.schedules",
    ),
}


@pytest.fixture(scope="module")
def plain(rollout_path: Path) -> list[dict[str, float]]:
    """What is logged without anybody else."""
    return run_cell(Cell(1, batch_flags(rollout_path), Recipe()))[0].rows


@pytest.fixture(scope="session")
def rollout_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from tests.parity.rollouts import make_steps, write_batches

    path = tmp_path_factory.mktemp("rollouts") / "directory"
    write_batches(path, make_steps())
    return path


@pytest.mark.parametrize("order", RIGHT)
def test_numbers_are_right_whoever_came_first(
    order: str, rollout_path: Path, plain: list[dict[str, float]]
) -> None:
    steps, called = RIGHT[order]
    cell = Cell(1, batch_flags(rollout_path), Recipe(), plugin=False,
                prepare=partial(in_order, *steps))
    (observed,) = run_cell(cell)
    assert observed.rows == plain and len(plain) == 6
    calls = observed.notes[0]
    assert all(calls[name] for name in called), calls


@pytest.mark.parametrize("order", WRONG)
def test_what_was_replaced_is_one_loud_error(order: str, rollout_path: Path) -> None:
    steps, message = WRONG[order]
    cell = Cell(1, batch_flags(rollout_path), Recipe(), plugin=False,
                prepare=partial(in_order, *steps))
    with pytest.raises(AssertionError, match=r"(?s)SiteError: .*" + message):
        run_cell(cell)


STOCK: dict[str, object] = {
    "sft": True,
    "no-create-attention-mask-in-dataloader": True,
    "seq-length": 64,
    "micro-batch-size": 1,
    "global-batch-size": 4,
    "train-samples": 12,
}


@pytest.mark.parametrize(
    "steps",
    [
        (install, uninstall),
        (install, sites, seams, uninstall),
        (sites, seams, install, uninstall),
        (install, declared, uninstall, restore),
    ],
    ids=["alone", "wrapped since", "wrapped before", "and the other plugin off too"],
)
def test_after_uninstall_megatron_trains_as_if_we_had_never_been(
    steps: tuple[Callable[[], Any], ...],
) -> None:
    rows = [
        run_cell(Cell(1, STOCK, Recipe(), plugin=False, prepare=prepare))[0].rows
        for prepare in (None, partial(in_order, *steps))
    ]
    assert rows[0] == rows[1] and len(rows[0]) == 3
