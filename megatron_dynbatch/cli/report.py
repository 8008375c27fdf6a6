"""``megatron-dynbatch report``: pictures and one HTML page about a training run."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from megatron_dynbatch.wording import counted

if TYPE_CHECKING:
    from megatron_dynbatch.cli.report_charts import Curve
    from megatron_dynbatch.cli.report_data import RunData
    from megatron_dynbatch.report import StepReport

DESCRIPTION = """\
Reads what a run left in RUN_DIR and writes report.html, which needs no other file, and its
pictures as PNG: history.png (reward, loss, size and fill of the steps), times.png (measured against
predicted step times), plan.png and samples.png (the plan of the largest step), each also narrow for
small screens. RUN_DIR holds the
step reports (--step-report RUN_DIR/steps.jsonl), and may hold the rollout directory and JSONL files
whose lines have batch_id and rollout/reward. Can be called while the training runs.
"""
EXAMPLES = """\
  megatron-dynbatch report runs/demo/seed-1
  megatron-dynbatch report RUN_DIR --rollouts DIR --out report --title "GRPO, 7B\""""

SAMPLES_TEXT = (
    "Samples of one rollout have one number; they may lie in different micro-batches and on "
    "different ranks, and are still averaged as one rollout."
)
_MOST_SAMPLES = 150
_LOSSES = ("loss", "lm loss")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of the subcommand."""
    parser.add_argument("run_dir", type=Path, metavar="RUN_DIR", help="what the run left behind")
    parser.add_argument("--out", type=Path, metavar="DIR", help="default: RUN_DIR/report")
    parser.add_argument("--steps", type=Path, metavar="JSONL", help="the step reports")
    parser.add_argument("--rollouts", type=Path, metavar="DIR", help="the rollout directory")
    parser.add_argument("--title", help="of the page")


def run(args: argparse.Namespace) -> int:
    """Write page and pictures.

    Raises:
        ValueError: There are no step reports, or matplotlib is missing.
    """
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        raise ValueError(
            "the pictures need matplotlib: pip install 'megatron-dynbatch[plot]'"
        ) from None
    from megatron_dynbatch.cli.report_data import read_run

    data = read_run(args.run_dir, args.steps, args.rollouts)
    out = args.out or args.run_dir / "report"
    out.mkdir(parents=True, exist_ok=True)
    write_report(data, out, args.title or f"Training run {data.folder.resolve().name}")
    print(f"{counted(len(data.reports), 'step')}: {out / 'report.html'}")
    return 0


def write_report(data: RunData, out: Path, title: str) -> None:
    """Write report.html and the pictures.

    Args:
        data: The run.
        out: Existing folder.
        title: Of the page.
    """
    from megatron_dynbatch.cli.report_charts import NARROW, WIDE, draw_history
    from megatron_dynbatch.cli.report_page import section, write_page

    for name, width in (("history", WIDE), ("history-narrow", NARROW)):
        draw_history(out / f"{name}.png", data.reports, curves_of(data), width)
    history = section(
        "", png=out / "history.png", narrow=out / "history-narrow.png",
        alt="reward, loss, size and fill of the steps",
    )  # fmt: skip
    sections = [
        history, times_section(data.reports, out), *plan_sections(data, out), run_section(data)
    ]  # fmt: skip
    write_page(
        out / "report.html",
        title=title,
        subtitle=f"{data.folder.resolve()}, steps {data.reports[0].iteration} to "
        f"{data.reports[-1].iteration}",
        figures=figures_of(data),
        sections=sections,
        reports=data.reports,
        rewards=data.rewards,
    )


def curves_of(data: RunData) -> dict[str, Curve]:
    """Reward and loss over the steps, as far as they are known."""
    curves: dict[str, Curve] = {}
    scored = [r for r in data.reports if r.batch_id in data.rewards]
    if scored:
        values = [data.rewards[r.batch_id] for r in scored]
        curves["Mean reward of the batch that the step trains on"] = _by_step(scored, values)
    for name in _LOSSES:
        known = [r for r in data.reports if r.metrics.get(name) is not None]
        if known:
            curves[f"Loss of the step ({name})"] = _by_step(known, [r.metrics[name] for r in known])
            break
    return curves


def _by_step(reports: Sequence[StepReport], values: Sequence[float]) -> Curve:
    return [r.iteration for r in reports], values


def figures_of(data: RunData) -> dict[str, str]:
    """The numbers at the top of the page."""
    reports = data.reports
    sizes = [r.step_global_batch_size for r in reports]
    counts = [r.num_microbatches for r in reports]
    tokens = sum(r.num_tokens for r in reports)
    figures = {
        "steps": f"{len(reports):,}",
        "rollouts per step": _span(sizes),
        "micro-batches per rank": _span(counts),
        "rollouts": f"{sum(sizes):,}",
        "samples": f"{sum(r.num_samples for r in reports):,}",
        "tokens": f"{tokens:,}",
        "mean fill": f"{sum(r.fill for r in reports) / len(reports):.0%}",
        "dummy micro-batches": f"{sum(r.num_dummies for r in reports):,}",
    }
    times = [r.step_time for r in reports if r.step_time is not None]
    if times:
        waited = sum(r.wait_time or 0.0 for r in reports if r.step_time is not None)
        figures["of the time, waiting for rollouts"] = f"{waited / sum(times):.0%}"
    skipped = sum(r.skipped for r in reports)
    if skipped:
        figures["skipped updates"] = str(skipped)
    return figures


def _span(values: Sequence[int]) -> str:
    low, high = min(values), max(values)
    return f"{low:,}" if low == high else f"{low:,} to {high:,}"


def times_section(reports: Sequence[StepReport], out: Path) -> str:
    """Measured against predicted step times."""
    from megatron_dynbatch.cli.report_charts import NARROW, draw_times
    from megatron_dynbatch.cli.report_page import section

    known = [
        (r.predicted_time, r.step_time - (r.wait_time or 0.0))
        for r in reports
        if r.predicted_time and r.step_time is not None
    ]
    known = [(x, y) for x, y in known if y > 0]
    heading = "Predicted and measured step times"
    if len(known) < 2:
        return section(heading, text="Fewer than two steps have both times.")
    predicted, measured = zip(*known, strict=True)
    deviation = draw_times(out / "times.png", predicted, measured)
    draw_times(out / "times-narrow.png", predicted, measured, NARROW)
    return section(
        heading,
        png=out / "times.png",
        narrow=out / "times-narrow.png",
        alt="measured over predicted step times",
        text=f"A point is a step. Half of the steps lie within {deviation:.0%} of the line. Where "
        "it begins above 0, that is what every step takes whatever is in it: the optimizer, start "
        "of kernels, collectives. megatron-dynbatch fit-cost fits the cost model to these times.",
    )


def plan_sections(data: RunData, out: Path) -> list[str]:
    """The plan of the step with most samples."""
    from megatron_dynbatch.cli.plan_plot import draw_step
    from megatron_dynbatch.cli.report_charts import NARROW, draw_samples
    from megatron_dynbatch.cli.report_data import plan_of_step
    from megatron_dynbatch.cli.report_page import section
    from megatron_dynbatch.plan.summary import summarize

    largest = max(data.reports, key=lambda r: r.num_samples)
    heading = f"The plan of the largest step ({largest.iteration})"
    plan = plan_of_step(data, largest)
    if plan is None:
        return [
            section(
                heading,
                text="It is not drawn: its batch is not in a rollout directory here, "
                "or it holds samples carried over from the batch before.",
            )
        ]
    summary, name = summarize(plan)[largest.step_index], f"Step {largest.iteration}"
    draw_step(plan, summary, out / "plan.png", name)
    draw_step(plan, summary, out / "plan-narrow.png", name, NARROW)
    sections = [section(
        heading, png=out / "plan.png", narrow=out / "plan-narrow.png",
        alt="ranks over time, micro-batches as blocks",
    )]  # fmt: skip
    if largest.num_samples <= _MOST_SAMPLES:
        draw_samples(plan, largest.step_index, out / "samples.png")
        draw_samples(plan, largest.step_index, out / "samples-narrow.png", NARROW)
        sections.append(section(
            "Its samples", text=SAMPLES_TEXT, png=out / "samples.png",
            narrow=out / "samples-narrow.png",
            alt="samples of each micro-batch",
        ))  # fmt: skip
    return sections


def run_section(data: RunData) -> str:
    """Which run it was: command, layout, model and versions."""
    from megatron_dynbatch.cli.report_page import section
    from megatron_dynbatch.handshake import read_layout

    known = data.identity
    pairs: dict[str, str] = {}
    for name in ("command", "started", "world_size"):
        if name in known:
            pairs[name] = str(known[name])
    layout = known.get("layout")
    if layout is None and data.rollouts is not None and (found := read_layout(data.rollouts)):
        layout = {k: v for k, v in found[0].to_dict().items() if v not in (None, False)}
    for name, values in (("layout", layout), ("model", known.get("model")),
                         ("versions", known.get("versions"))):  # fmt: skip
        if isinstance(values, dict):
            pairs[name] = ", ".join(f"{key} {value}" for key, value in values.items())
    text = "" if known else "Its command and versions are not known: no file .run.json lies there."
    return section("The run", text=text, pairs={k.replace("_", " "): v for k, v in pairs.items()})
