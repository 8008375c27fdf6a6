"""install() and uninstall() on the real Megatron."""

from __future__ import annotations

import pytest

from megatron_dynbatch.hooks.registry import SEAMS, SITES
from megatron_dynbatch.hooks.seams import Seam
from megatron_dynbatch.hooks.sites import Site
from tests.pool import run_ranks


def _sites() -> list[str | None]:
    from megatron_dynbatch.hooks.registry import SITES
    from megatron_dynbatch.hooks.sites import inspect_sites

    return [report.problem for report in inspect_sites(SITES)]


def test_every_site_matches_the_installed_megatron() -> None:
    (problems,) = run_ranks(1, _sites, process_group=False)
    assert problems and set(problems) == {None}


def _touched() -> dict[str, object]:
    from megatron.core import num_microbatches_calculator
    from megatron.training import arguments, checkpointing, training

    modules = (num_microbatches_calculator, arguments, checkpointing, training)
    found = {}
    for module in modules:
        for name, value in vars(module).items():
            found[f"{module.__name__}.{name}"] = (value, getattr(value, "__code__", None))
    return found


def _install_and_uninstall() -> tuple[set[str], set[str], set[str]]:
    import megatron_dynbatch

    before = _touched()
    megatron_dynbatch.install()
    once = _touched()
    megatron_dynbatch.install()
    twice = _touched()
    megatron_dynbatch.uninstall()
    after = _touched()

    def differing(a: dict[str, object], b: dict[str, object]) -> set[str]:
        return {name for name in a.keys() | b.keys() if a.get(name) != b.get(name)}

    return differing(before, once), differing(once, twice), differing(before, after)


def test_uninstall_restores_everything_and_twice_is_once() -> None:
    ((changed, again, left),) = run_ranks(1, _install_and_uninstall, process_group=False)
    names = {name.rsplit(".", 1)[1] for name in changed}
    assert names == {
        "train", "train_step", "training_log", "load_checkpoint", "__dynbatch_sites__",
        "add_megatron_arguments", "_build_num_microbatches_calculator",
        "build_train_valid_test_data_iterators", "get_forward_backward_func",
        "consume_seqlen_stats_in_iteration",
    }
    assert again == set()
    assert left == set()


def _half_missing() -> tuple[str, set[str]]:
    from megatron.training import training

    import megatron_dynbatch

    del training.get_forward_backward_func
    before = _touched()
    try:
        megatron_dynbatch.install()
    except megatron_dynbatch.hooks.SiteError as error:
        after = _touched()
        return str(error), {name for name in before if before[name] != after[name]}
    return "no error", set()


def test_a_missing_seam_changes_nothing() -> None:
    ((message, changed),) = run_ranks(1, _half_missing, process_group=False)
    assert "megatron.training.training has no get_forward_backward_func" in message
    assert changed == set()


@pytest.mark.parametrize("entry", [*SITES, *SEAMS])
def test_every_place_says_why_it_is_touched_and_until_when(entry: Site | Seam) -> None:
    assert entry.why and entry.until
