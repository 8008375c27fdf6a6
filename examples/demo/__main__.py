"""``python -m examples.demo --out DIR``: reinforcement learning on the real Megatron, on a CPU.

A tiny GPT learns to spell words backward: a short supervised warm-up, then GRPO with agentic
rollouts that each emit one to five samples. Two processes run Megatron's own ``pretrain``; every
step has as many rollouts as were made. DIR gets summary.json, steps.png, plan.png, report.html, and
a folder for each seed with rollouts, checkpoints, step reports and logs.

With --async generation runs ahead of training, against the same in turns; see
`examples.demo.asynchronous`. DIR gets summary.json, timeline.png and report.html.
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from examples.demo.asynchronous import Arm, compare, comparison_lines, ledger_lines, run_arms
from examples.demo.charts import TITLE, draw_steps, draw_timeline
from examples.demo.control import control_lines, fixed_batch_control, whole_batches
from examples.demo.results import print_table, rise, step_rows
from examples.demo.runs import LAYOUTS, SeedRun, Settings
from examples.demo.training import TrainingFailed, read_json_lines, read_reports
from megatron_dynbatch import RolloutDirectory
from megatron_dynbatch.cli.report import SAMPLES_TEXT
from megatron_dynbatch.cli.report_charts import draw_samples
from megatron_dynbatch.cli.report_page import section, write_page
from megatron_dynbatch.plan import Plan, make_plan


def parse_arguments(argv: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="python -m examples.demo",
        description="Reinforcement learning on the real Megatron, on two CPU processes.",
    )
    add = parser.add_argument
    add("--out", type=Path, required=True, metavar="DIR", help="for all results")
    add("--seeds", type=int, default=1, metavar="N", help="train seeds 1 to N (default: 1)")
    add("--layout", choices=LAYOUTS, help="what the two processes share (default: dp2)")
    add("--resume", action="store_true", help="go on where an earlier run in DIR stopped")
    add("--steps", type=int, default=Settings.steps, help="steps of reinforcement learning")
    add("--groups", type=int, default=Settings.groups, help="prompt groups per batch, on average")
    add("--shuffle-advantages", action="store_true", help="control: nothing is learned then")
    add(
        "--async",
        dest="asynchronous",
        action="store_true",
        help="generation ahead of training, timed against generation in turns",
    )
    add("--batches", type=int, default=30, help="with --async: batches of each arm")
    add("--max-staleness", type=int, default=1, metavar="BATCHES", help="with --async")
    add(
        "--seconds",
        type=float,
        default=2.0,
        help="with --async: what a batch takes to generate, and a step to train, at least",
    )
    arguments = parser.parse_args(argv)
    if arguments.asynchronous and (
        arguments.layout or arguments.resume or arguments.shuffle_advantages or arguments.seeds > 1
    ):
        parser.error(
            "--async times whole runs of one seed, with one process that trains and one that "
            "generates: leave out --layout, --resume, --seeds and --shuffle-advantages"
        )
    return arguments


def run_all(arguments: argparse.Namespace) -> None:
    """Train every seed, then show what came out."""
    start = time.monotonic()
    settings = Settings(
        layout=arguments.layout or Settings.layout,
        steps=arguments.steps,
        groups=arguments.groups,
        shuffle_advantages=arguments.shuffle_advantages,
        resume=arguments.resume,
    )
    out = arguments.out.resolve()
    runs = [SeedRun(out / f"seed-{k}", k, settings) for k in range(1, arguments.seeds + 1)]
    for run in runs:
        print(f"seed {run.seed}: {settings.layout}, {settings.steps} steps", flush=True)
        run.run()
    show(out, runs, time.monotonic() - start)


def run_asynchronous(arguments: argparse.Namespace) -> None:
    """Train both arms, then show what came out."""
    out = arguments.out.resolve()
    run = SeedRun(out / "seed-1", 1, Settings(groups=arguments.groups))
    arms = run_arms(run, arguments.batches, arguments.max_staleness, arguments.seconds)
    show_asynchronous(out, arms)


def show_asynchronous(out: Path, arms: Sequence[Arm]) -> None:
    """Lines, summary.json, the picture and the page."""
    shown = compare(arms, [arm.ledger() for arm in arms])
    (out / "summary.json").write_text(json.dumps(shown, indent=1) + "\n", encoding="utf-8")
    draw_timeline({arm.name: shown[arm.name]["ledger"] for arm in arms}, out / "timeline.png")
    lines = comparison_lines(shown)
    for line in lines:
        print(line)
    last = arms[-1]
    ledger = shown[last.name]["ledger"]
    write_page(
        out / "report.html",
        title="Generation ahead of training",
        subtitle=(
            "Spelling words backward; generation in one CPU process, Megatron in another. Batches "
            f"and steps sleep until they have lasted {last.least_seconds} s"
        ),
        figures={
            "wall time, asynchronous / synchronous": f"{shown['wall_ratio']:.2f}",
            "without the start-up": f"{shown['loop_ratio']:.2f}",
            **{f"batches, oldest rollout, {a.name}": str(shown[a.name]["oldest"]) for a in arms},
        },
        sections=[
            section("", png=out / "timeline.png", alt="when batches are generated and trained"),
            section("Both arms", points=lines),
            section(f"Ledger, {last.name}", points=ledger_lines(ledger)),
        ],
        reports=read_reports(last.steps_file),
        rewards={row["batch_id"]: row["reward"] for row in ledger},
        table_title=f"All steps, {last.name}",
    )
    print(f"summary.json, timeline.png and report.html are in {out}")


def rows_of(run: SeedRun) -> list[dict[str, Any]]:
    """Numbers of a seed's steps."""
    return step_rows(run.reports(), read_json_lines(run.episodes_file))


def show(out: Path, runs: list[SeedRun], seconds: float) -> None:
    """Table, summary.json, pictures and the page."""
    rows = {run.seed: rows_of(run) for run in runs}
    first = runs[0]
    first_rows = rows[first.seed]
    layout = LAYOUTS[first.settings.layout]
    batches, their_rows = whole_batches(RolloutDirectory(first.rollouts), first_rows)
    control = fixed_batch_control(batches, their_rows, layout.dp)
    print_table(first_rows)
    for line in control_lines(control):
        print(line)
    risen = {seed: rise(own) for seed, own in rows.items()}
    for seed, (before, after) in risen.items():
        print(
            f"seed {seed}: mean reward {before:.3f} in the first fifth of the steps, {after:.3f} "
            f"in the last: {after - before:+.3f}"
        )
    summary = {
        "seconds": round(seconds, 1),
        "layout": first.settings.layout,
        "seeds": [
            {"seed": seed, "reward_first_fifth": risen[seed][0],
             "reward_last_fifth": risen[seed][1], "steps": own}
            for seed, own in rows.items()
        ],
        "control": control,
    }  # fmt: skip
    (out / "summary.json").write_text(json.dumps(summary, indent=1) + "\n", encoding="utf-8")
    rewards = {
        seed: ([row["iteration"] for row in own], [row["reward"] for row in own])
        for seed, own in rows.items()
    }
    draw_steps(rewards, first.reports(), out / "steps.png")
    plan_step = draw_largest_plan(first, out / "plan.png")
    write_html(out, first, plan_step, control_lines(control), first_rows, risen[first.seed])
    print(f"summary.json, steps.png, plan.png and report.html are in {out}")


def draw_largest_plan(run: SeedRun, path: Path) -> int:
    """Draw the plan of the step with most samples; returns its iteration."""
    report = max(run.reports(), key=lambda r: r.num_samples)
    plan = plan_of(run, report.batch_id)
    draw_samples(plan, report.step_index, path)
    return report.iteration


def plan_of(run: SeedRun, batch_id: int) -> Plan:
    """The plan that training made for a batch: planning is deterministic."""
    index = RolloutDirectory(run.rollouts).index(batch_id)
    return make_plan(index, LAYOUTS[run.settings.layout], run.settings.plan_options)


def write_html(
    out: Path,
    run: SeedRun,
    plan_step: int,
    control: list[str],
    rows: list[dict[str, Any]],
    risen: tuple[float, float],
) -> None:
    """Write report.html."""
    reports = run.reports()
    sizes = [r.step_global_batch_size for r in reports]
    steps = section("", png=out / "steps.png", alt="reward, size and fill of the steps")
    plan = section(
        f"The plan of one step ({plan_step})", text=SAMPLES_TEXT, png=out / "plan.png",
        alt="samples of each micro-batch",
    )  # fmt: skip
    write_page(
        out / "report.html",
        title=TITLE,
        subtitle=f"Spelling words backward; Megatron on two CPU processes, {run.settings.layout}",
        figures={
            "mean reward, first → last fifth": f"{risen[0]:.2f} → {risen[1]:.2f}",
            "rollouts per step": f"{min(sizes)} to {max(sizes)}",
            "rollouts": f"{sum(sizes):,}",
            "samples": f"{sum(r.num_samples for r in reports):,}",
            "dummy micro-batches": str(sum(r.num_dummies for r in reports)),
        },
        sections=[
            steps, plan,
            section("The same rollouts in a fixed global batch", points=control),
        ],
        reports=reports,
        rewards={row["batch_id"]: row["reward"] for row in rows},
        table_title=f"All steps (seed {run.seed})",
    )  # fmt: skip


def main() -> int:
    """Exit code 1 with the reason if training failed."""
    arguments = parse_arguments()
    # A plain kill is treated like Ctrl-C, so that the processes of the training end too.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        (run_asynchronous if arguments.asynchronous else run_all)(arguments)
    except TrainingFailed as error:
        print(f"the demo failed: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        hint = "" if arguments.asynchronous else "; go on with --resume"
        print(f"stopped{hint}", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
