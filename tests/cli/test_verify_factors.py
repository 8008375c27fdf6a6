"""What a run of `verify` changed, and which change a deviation is put down to."""

import pytest

from megatron_dynbatch.cli.verify_cells import Cell, Outcome
from megatron_dynbatch.cli.verify_factors import causes, factors, has_siblings, separates_siblings
from megatron_dynbatch.rollouts import Sample

REFERENCE = Outcome(splits=[[[[0, 1, 2]]]], trained=[{(0, 0): 6}])


@pytest.mark.parametrize(
    ("split", "trained", "found"),
    [
        ([[[0, 1, 2]]], {(0, 0): 6}, ""),
        ([[[0, 1], [2]]], {(0, 0): 6}, "packing"),
        ([[[0, 1, 2]], [[]]], {(0, 0): 6, (1, 0): 0}, ""),  # a dummy is no split
        ([[[0, 1]], [[2]]], {(0, 0): 4, (1, 0): 2}, "packing dp"),
        ([[[0, 1, 2]]], {(0, 0): 3, (0, 1): 3}, "cp"),
        ([[[0, 1, 2]]], {(0, 0): 0, (0, 1): 6}, ""),
        ([[[0, 1]], [[2]]], {(0, 0): 4, (1, 1): 2}, "packing dp"),
    ],
)
def test_what_a_run_changed_is_read_off_its_plan(
    split: list[list[list[int]]], trained: dict[tuple[int, int], int], found: str
) -> None:
    cell = Cell("any", frozenset({"cp"}), 2, 2, 8)
    outcome = Outcome(splits=[split], trained=[trained])
    assert factors(cell, outcome, REFERENCE) == set(found.split())


CHANGED = {
    "many": frozenset({"packing"}),
    "DP2": frozenset({"packing", "dp"}),
    "CP2": frozenset({"cp"}),
    "CP2, many": frozenset({"packing", "cp"}),
    "DP2 x CP2": frozenset({"packing", "dp", "cp"}),
    "twice": frozenset({"twice"}),
}


@pytest.mark.parametrize(
    ("wrong", "found"),
    [
        (["DP2", "DP2 x CP2"], ["dp"]),
        (["CP2", "CP2, many", "DP2 x CP2"], ["cp"]),
        (["many", "DP2", "CP2", "CP2, many", "DP2 x CP2"], ["packing"]),
        (["CP2, many", "DP2 x CP2"], ["packing cp"]),  # neither alone
        (["DP2 x CP2"], ["packing dp cp"]),
        (["twice"], ["twice"]),
        (["DP2", "CP2", "CP2, many", "DP2 x CP2"], ["dp", "cp"]),
        (["many", "DP2", "DP2 x CP2", "CP2, many", "twice"], ["packing", "twice"]),
    ],
)
def test_a_deviation_is_put_down_to_the_fewest_changes(wrong: list[str], found: list[str]) -> None:
    assert set(causes(CHANGED, wrong)) == {frozenset(f.split()) for f in found}


def test_changes_that_no_run_tells_apart_are_named_together() -> None:
    changed = {"DP2": CHANGED["DP2"]}
    assert causes(changed, ["DP2"]) == [{"packing", "dp"}]


def test_siblings() -> None:
    batch = [Sample([1, 2, 3], response_length=1, rollout_id=r) for r in (0, 0, 1)]
    assert has_siblings(batch) and not has_siblings(batch[1:])
    assert separates_siblings([[[0], [1, 2]]], batch)
    assert separates_siblings([[[0, 2]], [[1]]], batch)
    assert not separates_siblings([[[0, 1], [2]]], batch)
