"""What a real training writes about its steps: JSONL, and Megatron's own writers."""

from pathlib import Path
from typing import Any

import pytest

from megatron_dynbatch.report import StepReport, StepReportWriter, read_step_reports
from megatron_dynbatch.report.catalogue import LOSS, STEP
from tests.cpu.training import train
from tests.parity.rollouts import STEP_SIZES, batch_flags, make_steps, write_batches
from tests.pool import run_ranks


class Recorder:
    """Stands where Megatron keeps its TensorBoard writer and its W&B module."""

    def __init__(self) -> None:
        self.scalars: dict[str, list[tuple[int, float]]] = {}
        self.logged: list[tuple[int, set[str]]] = []

    def add_scalar(self, name: str, value: Any, iteration: int) -> None:
        self.scalars.setdefault(name, []).append((iteration, float(value)))

    def add_text(self, *args: object, **named: object) -> None:
        """Megatron writes its arguments."""

    def flush(self) -> None:
        """At the end of a training."""

    finish = flush

    def log(self, values: dict[str, float], iteration: int) -> None:
        self.logged.append((iteration, set(values)))


def job(argv: list[str]) -> tuple[dict[str, list[tuple[int, float]]], list[tuple[int, set[str]]]]:
    recorder = Recorder()

    def before(model: object, optimizer: object) -> None:
        from megatron.training import global_vars

        global_vars._GLOBAL_TENSORBOARD_WRITER = recorder
        global_vars._GLOBAL_WANDB_WRITER = recorder

    train(argv, install_hooks=True, before=before)
    return recorder.scalars, recorder.logged


def test_a_training_reports_every_step(tmp_path: Path) -> None:
    write_batches(tmp_path / "rollouts", make_steps())
    argv = ["--step-report", str(tmp_path / "reports" / "steps.jsonl"), "--global-batch-size", "12"]
    for name, value in batch_flags(tmp_path / "rollouts").items():
        argv += [f"--{name}"] if value is True else [f"--{name}", str(value)]
    at = argv.index("--train-samples")
    del argv[at : at + 2]
    argv += ["--train-iters", "3", "--rollouts-per-step", "12"]
    ((scalars, logged),) = run_ranks(1, job, argv)
    reports = read_step_reports(tmp_path / "reports" / "steps.jsonl")
    assert [r.step_global_batch_size for r in reports] == list(STEP_SIZES[:3])
    assert [r.iteration for r in reports] == [1, 2, 3]
    assert reports[0].step_time is None and reports[1].step_time > 0
    for r in reports:
        assert r.balance == 1.0  # one rank
        assert r.predicted_time > 0 and r.num_oversize == 0
        # The same numbers, on the iteration axis, in TensorBoard and in W&B.
        for name in STEP:
            value = getattr(r, name)
            if value is not None:
                assert (r.iteration, value) in scalars[f"train/{name}"]
        assert dict(scalars["train/lm loss"])[r.iteration] == r.metrics["lm loss"]
        assert any(i == r.iteration and "train/balance" in names for i, names in logged)


def report(**changes: Any) -> StepReport:
    values: dict[str, Any] = dict(
        iteration=1, batch_id=0, step_index=0, step_global_batch_size=2, num_samples=3,
        num_microbatches=2, num_dummies=0, num_tokens=30, num_trained_tokens=20, fill=0.5,
        consumed_rollouts=2, learning_rate=None, grad_norm=float("nan"), loss_scale=1.0,
        skipped=False, metrics={"kl": float("inf"), "loss": 1.5},
    )  # fmt: skip
    return StepReport(**{**values, **changes})


def test_reports_come_back_and_json_stays_json(tmp_path: Path) -> None:
    for part in range(2):  # a run that goes on appends
        writer = StepReportWriter(tmp_path / "new" / "steps.jsonl")
        writer.write(report(iteration=part))
        writer.close()
    first, second = read_step_reports(tmp_path / "new" / "steps.jsonl")
    assert (first.iteration, second.iteration) == (0, 1)
    assert first.grad_norm is None and first.metrics == {"kl": None, "loss": 1.5}
    assert first.scalars()["train/loss"] == 1.5 and "train/kl" not in first.scalars()


def test_names_units_and_kinds_are_listed_in_the_documentation() -> None:
    from megatron_dynbatch.report.catalogue import ROLLOUT
    from tests.pool import ROOT

    text = (ROOT / "docs" / "metrics.md").read_text()
    for prefix, table in (("train", LOSS), ("train", STEP), ("rollout", ROLLOUT)):
        for name, spec in table.items():
            assert f"| `{prefix}/{name}` | {spec.kind} | {spec.unit} | {spec.meaning} |" in text


@pytest.mark.parametrize("table", [LOSS, STEP], ids=["loss", "step"])
def test_every_entry_says_what_it_is(table: dict) -> None:
    assert all(spec.meaning for spec in table.values())
