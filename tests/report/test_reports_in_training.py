"""What losses report reaches Megatron's log through the hooks: every kind, and no lost name."""

from pathlib import Path

import numpy as np
import pytest

from tests.parity.job import Cell, run_cell
from tests.parity.layouts import Layout
from tests.parity.rollouts import batch_flags, make_steps, write_batches

SCRIPT = Path(__file__).parent / "typed_script.py"


@pytest.fixture(scope="module")
def rollouts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("reports") / "rollouts"
    write_batches(path, make_steps()[:2])
    return path


def rows(path: Path, layout: Layout, loss: str) -> list[dict[str, float]]:
    flags = {**batch_flags(path), **layout.flags(), "train-samples": 13, "test-loss": loss}
    return run_cell(Cell(layout.ranks, flags, script=SCRIPT), timeout=90)[-1].rows


@pytest.mark.parametrize(
    "layout", [Layout(), Layout(dp=2), Layout(cp=2), Layout(pp=2)], ids=lambda layout: layout.name
)
def test_every_kind_is_the_same_number_under_every_layout(layout: Layout, rollouts: Path) -> None:
    for row, step in zip(rows(rollouts, layout, "every_kind"), make_steps()[:2], strict=True):
        # x of a token is its label plus 1, so every number can be counted from the rollouts.
        x = np.array([
            token + 1
            for example in step
            for token, m in zip(example.tokens[-len(example.mask):], example.mask, strict=True)
            if m
        ])  # fmt: skip
        expected = {"smallest": x.min(), "largest": x.max(), "tokens": x.size, "sum": x.sum()}
        assert {name: row[name] for name in expected} == pytest.approx(expected, rel=1e-12)


def test_a_name_that_one_rank_lacks_is_an_error_and_no_hang(rollouts: Path) -> None:
    with pytest.raises(AssertionError) as caught:
        rows(rollouts, Layout(dp=2), "one_rank_reports_more")
    message = str(caught.value)
    assert "metric 'extra' is reported by rank 1 but not by rank 0" in message
