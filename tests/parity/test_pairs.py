"""Every two traits together: trainings that have both, against every sample alone."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from megatron_dynbatch.hooks.proven import PROVEN
from tests.deviation import relative
from tests.docs.traits import possible_pairs
from tests.parity.alone import EMBEDDING
from tests.parity.compare import tensor_deviation
from tests.parity.pairs import SIZES, STEP, every_sample_alone, train, whole_gradients
from tests.parity.rollouts import write_batches
from tests.parity.test_layouts import Record, full
from tests.parity.traits_flags import Traits, allowed, completed, met

# The dearest are left to `make parity`.
FAST, SLOW = ("1",), ("2", "3")


def marked(name: str) -> object:
    if name in FAST:
        return name
    return pytest.param(name, marks=pytest.mark.slow if name in SLOW else full)


@pytest.fixture(scope="module")
def one_step(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("pairs") / "rollouts"
    write_batches(path, [STEP])
    return path


@pytest.mark.parametrize("name", [marked(name) for name in PROVEN])
def test_a_training_with_these_traits_equals_every_sample_alone(
    name: str, one_step: Path, record: Record
) -> None:
    traits = PROVEN[name]
    # Losses on logits and on Megatron's own token losses take turns.
    observed = train(traits, one_step, "logits" if int(name) % 2 else "stock")
    partitions = [note for note in observed[0].notes if isinstance(note, list)]
    for one in observed:
        assert [note for note in one.notes if isinstance(note, set)] == [set(traits)]
    whole = whole_gradients(
        [note for one in observed for note in one.notes if isinstance(note, dict)]
    )
    loss, gradients = every_sample_alone(traits, partitions[0])
    copy = whole.pop("output_layer.weight", None) if EMBEDDING not in gradients else None
    assert copy is None or torch.equal(copy, whole[EMBEDDING])
    found = {
        "traits": ", ".join(sorted(traits)),
        "loss": relative(observed[-1].rows[0]["lm loss"], loss),
        "gradients": tensor_deviation(whole, gradients),
    }
    record("pairs", name, found)
    assert len(SIZES) == 1
    is_float32 = "distributed-optimizer" in traits
    assert max(found["loss"], found["gradients"]) < (1e-5 if is_float32 else bar_of(traits))


def bar_of(traits: Traits) -> float:
    """Megatron keeps the counts of the load-balancing loss of a micro-batch in float32."""
    over_micro_batches = "aux-loss" in traits and not traits & {
        "balance-previous-step", "balance-same-step"
    }  # fmt: skip
    return 1e-6 if over_micro_batches else 1e-9


def test_every_pair_of_the_table_has_a_training_exact_enough() -> None:
    proved = set[Traits]().union(*(met(traits) for traits in PROVEN.values()))
    for first, second in possible_pairs():
        pair = frozenset((first.name, second.name))
        assert pair in proved or not allowed(completed(pair)), "run python -m tests.parity.pairs"
