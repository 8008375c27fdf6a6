"""`megatron-dynbatch plan` and `fit-cost`, from each kind of input."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from megatron_dynbatch.cli.main import build_parser
from megatron_dynbatch.handshake import publish_layout
from megatron_dynbatch.plan import CostModel, ParallelLayout, Plan, PlanOptions, make_plan
from megatron_dynbatch.plan.summary import summarize
from megatron_dynbatch.report import StepReport
from megatron_dynbatch.rollouts import RolloutDirectory, Sample, SampleIndex


def call(*argv: str) -> int:
    args = build_parser(argv).parse_args(argv)
    return int(args.run(args))


def figures(capsys: pytest.CaptureFixture[str], *argv: str) -> dict:  # type: ignore[type-arg]
    assert call("plan", *argv, "--json") == 0
    return json.loads(capsys.readouterr().out)  # type: ignore[no-any-return]


def test_table_of_a_named_distribution(capsys: pytest.CaptureFixture[str]) -> None:
    assert call("plan", "--distribution", "A", "--num-samples", "64", "--dp", "4") == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split()[:4] == ["step", "rollouts", "samples", "tokens"]
    assert lines[1].split()[:3] == ["0", "64", "64"]
    assert lines[2].startswith("planned in ")


def test_figures_of_a_case_worked_out_by_hand(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "lengths.jsonl"
    path.write_text("\n".join(["9", "9", '{"length": 9}']))
    cost = ("--cost-alpha", "1", "--cost-beta", "0", "--cost-gamma", "2")
    result = figures(
        capsys, "--lengths", str(path), "--dp", "2", "--max-tokens-per-gpu", "10", *cost
    )
    (step,) = result["steps"]
    assert (step["num_microbatches"], step["fewest_microbatches"]) == (2, 2)
    assert (step["num_dummies"], step["num_tokens"]) == (1, 27)
    assert step["fill"] == pytest.approx(27 / 40)
    # One rank must run two of the three: the bound max(27/2, 9, 9 + 9) is reached.
    assert step["balance"] == 1.0
    assert step["lockstep"] == pytest.approx(18 / 13.5)
    # Two micro-batches of 9 and a fixed cost of 2 each; the dummy costs 2 as well.
    assert step["seconds"] == 22
    assert step["bubble"] == pytest.approx(1 - (27 + 4 * 2) / 2 / 22)


def test_parquet_of_lengths_and_rollouts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "lengths.parquet"
    table = {"length": [5, 6, 7], "response_length": [1, 2, 3], "rollout_id": [4, 4, 8]}
    pq.write_table(pa.table(table), path)
    out = tmp_path / "plan.json"
    result = figures(
        capsys,
        *("--lengths", str(path), "--max-tokens-per-gpu", "16", "--rollouts-per-step", "1"),
        *("--plan-json", str(out)),
    )
    assert [step["num_samples"] for step in result["steps"]] == [2, 1]
    plan = Plan.from_json(out.read_text())
    assert plan.fingerprint == result["fingerprint"]
    assert plan.sample_denoms.tolist() == [3, 3, 3]


def test_rollout_directory(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    directory = RolloutDirectory(tmp_path / "rollouts")
    directory.write([Sample(tokens=np.arange(n), response_length=2) for n in (3, 5, 9)])
    result = figures(capsys, "--rollouts", str(tmp_path / "rollouts"), "--max-tokens-per-gpu", "10")
    assert result["steps"][0]["num_tokens"] == 17


@pytest.mark.parametrize("extra", [(), ("--ep", "4"), ("--pp", "2"), ("--pp", "2", "--vpp", "2")])
def test_picture(tmp_path: Path, extra: tuple[str, ...]) -> None:
    pytest.importorskip("matplotlib")
    path = tmp_path / "plan.png"
    argv = ("--distribution", "G", "--num-samples", "40", "--dp", "4", "--plot", str(path))
    assert call("plan", *argv, *extra) == 0
    assert path.read_bytes().startswith(b"\x89PNG")
    assert path.stat().st_size > 10_000


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "line 1: not JSON"),
        ('{"size": 3}', "row 0: total_length or length must be an integer, is None"),
        ('{"length": 3.5}', "is 3.5"),
        ("7\n0", "no tokens"),
    ],
)
def test_files_that_are_no_lengths(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "lengths.jsonl"
    path.write_text(text)
    with pytest.raises(ValueError, match=message):
        call("plan", "--lengths", str(path), "--max-tokens-per-gpu", "8")


def test_missing_file_and_missing_step(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no such file"):
        call("plan", "--lengths", str(tmp_path / "none.jsonl"), "--max-tokens-per-gpu", "8")
    with pytest.raises(ValueError, match="the plan has 1 step, from 0"):
        call("plan", "--distribution", "A", "--plot", str(tmp_path / "a.png"), "--step", "3")


def test_fit_prints_the_options_of_plan(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "times.jsonl"
    rows = [
        {"lengths": lengths, "seconds": 2e-6 * sum(lengths) + 1e-3}
        for lengths in ([100], [4000], [512, 512], [30000])
    ]
    path.write_text("\n".join(json.dumps(row) for row in rows))
    assert call("fit-cost", str(path)) == 0
    words = capsys.readouterr().out.split()
    assert float(words[1]) == pytest.approx(2e-6)
    assert float(words[5]) == pytest.approx(1e-3)
    path.write_text('{"lengths": [1]}')
    with pytest.raises(ValueError, match="line 1"):
        call("fit-cost", str(path))


@pytest.mark.parametrize("layout", [ParallelLayout(dp=2), ParallelLayout(dp=2, pp=2)])
def test_fit_of_a_run_finds_the_coefficients_that_made_its_times(
    layout: ParallelLayout, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Steps timed by a known cost model, one of them slowed down by a checkpoint."""
    cost = CostModel(alpha=2e-6, beta=3e-9, gamma=1e-3)
    options = PlanOptions(max_tokens_per_gpu=4096, rollouts_per_step=12, cost=cost)
    directory = RolloutDirectory(tmp_path / "rollouts")
    publish_layout(directory, layout, options)
    rng = np.random.default_rng(3)
    reports = []
    for batch in range(12):
        lengths = np.minimum(rng.lognormal(6, 1, 24).astype(int) + 4, 4000)
        samples = [Sample(np.arange(n), response_length=2) for n in lengths]
        plan = make_plan(SampleIndex.from_samples(samples), layout, options)
        directory.write(samples, plan.to_json())
        for summary in summarize(plan):
            seconds = summary.seconds + (9.0 if batch == 7 else 0.0)
            values = dict.fromkeys(StepReport.__dataclass_fields__, 0) | {
                "iteration": len(reports) + 1, "batch_id": batch, "step_index": summary.step,
                "num_samples": summary.num_samples, "step_time": seconds + 0.5, "wait_time": 0.5,
                "num_microbatches": summary.num_microbatches,
            }  # fmt: skip
            reports.append(json.dumps(values))
    (tmp_path / "steps.jsonl").write_text("\n".join(reports) + "\n")
    assert call("fit-cost", str(tmp_path)) == 0
    shown = capsys.readouterr()
    words = shown.out.split()
    assert [float(word) for word in words[1::2]] == pytest.approx([2e-6, 3e-9, 1e-3], rel=0.02)
    assert "left out as outliers" in shown.err


def test_times_have_a_unit(capsys: pytest.CaptureFixture[str]) -> None:
    call("plan", "--distribution", "A", "--num-samples", "8")
    assert "time (tokens)" in capsys.readouterr().out
    call("plan", "--distribution", "A", "--num-samples", "8", "--cost-alpha", "1e-6")
    assert "time (s)" in capsys.readouterr().out
