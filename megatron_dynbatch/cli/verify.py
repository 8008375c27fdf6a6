"""``megatron-dynbatch verify``: is a script's loss the same however its data are cut?

Runs the user's own pretrain script on a few small rollouts, on the real Megatron on the CPU, under
several splits into micro-batches, data- and context-parallel sizes, and compares the gradient and
every reported metric of every step. Two more runs change the data in a way that must not matter:
samples without a trained token, and every rollout twice.
"""

from __future__ import annotations

import argparse
import re
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from megatron_dynbatch.cli.verify_cells import Cell, Outcome, run_cell
from megatron_dynbatch.cli.verify_rollouts import (
    made_up_batches,
    read_batches,
    twice,
    with_masked_siblings,
    write_batches,
)
from megatron_dynbatch.rollouts import Sample

GRADIENT = "gradient"
SMALLEST_SCALE = 0.01
"""Deviations of a metric are relative to its value, or to this if it is smaller."""

# Stand before the script's own arguments, which win.
_TINY_MODEL = (
    "--num-layers 2 --hidden-size 32 --num-attention-heads 4 --ffn-hidden-size 64 "
    "--normalization RMSNorm --position-embedding-type rope --swiglu --disable-bias-linear "
    "--untie-embeddings-and-output-weights --attention-dropout 0 --hidden-dropout 0 "
    "--tokenizer-type NullTokenizer --vocab-size 127 --make-vocab-size-divisible-by 16 --lr 1e-3"
).split()

# What verify decides itself, and what would make runs differ, stop early or write files.
_TAKEN_AWAY = re.compile(
    r"--(context-parallel-size|max-tokens-per-gpu|rollout-path|rollouts-per-step|leftover|"
    r"oversize|train-iters|train-samples|exit-.*|global-batch-size|micro-batch-size|rampup-.*|"
    r"seq-length|max-position-embeddings|save.*|load|eval-.*|full-validation|log-interval|"
    r"lr-decay-(iters|samples)|lr-warmup-.*|lr-wsd-decay-.*|tensorboard-.*|wandb-.*|step-report|"
    r"use-distributed-optimizer|overlap-(grad-reduce|param-gather)|bf16|fp16|fp8-.*|"
    r"(data|train-data|valid-data|test-data)-path|mock-data|dynamic-global-batch)(=.*)?"
)

_EXPLAINED = {
    "packing": "it changes with the split into micro-batches: something is averaged per "
    "micro-batch, or divided by a count of one micro-batch",
    "dp": "it changes with data parallelism: something is divided by a count of one rank",
    "cp": "it changes with context parallelism: something is a count or a mean of one rank's "
    "part of the samples",
    "masked": "samples without a trained token change it: they are clamped into a denominator",
    "twice": "it changes when the step holds every rollout twice: it is a sum, or divided by a "
    "count of the step once more than the plugin does",
}
KINDS = tuple(_EXPLAINED)
_REMEDY = (
    "Return the sum of token weights times values and divide by nothing: microbatch.mean(x) in a "
    "loss with keyword `microbatch`, the plain masked sum in a stock one; report means likewise."
)


@dataclass
class Verdict:
    """What the runs said about one quantity.

    Attributes:
        name: "gradient", or a metric's.
        value: In the first step of the first cell; the gradient's is its norm.
        deviations: Cell → relative deviation from the first cell; infinite where it is missing.
        tolerance: Largest deviation that counts as equal.
    """

    name: str
    value: float
    deviations: dict[str, float]
    tolerance: float

    @property
    def invariant(self) -> bool:
        """Whether no cell deviates; NaN deviates."""
        return all(d <= self.tolerance for d in self.deviations.values())


@dataclass
class Verification:
    """The result of `verify`.

    Attributes:
        cells: The cells that were run, the reference first.
        verdicts: One for each quantity.
        errors: Cell → what its run failed with.
        notes: What was left out, and why.
    """

    cells: list[Cell]
    verdicts: list[Verdict] = field(default_factory=list)
    errors: dict[str, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    @property
    def invariant(self) -> bool:
        """Whether every run succeeded and no quantity deviates anywhere."""
        return not self.errors and all(v.invariant for v in self.verdicts)

    def reasons(self) -> list[str]:
        """Why not, one line for each kind of change that matters, the plainest first."""
        wrong = {c.kind for c in self.cells for v in self.verdicts if not _holds(v, c)}
        # A wrong split shows under every layout too; only what it does not explain is named.
        if "packing" in wrong:
            wrong -= {"dp", "cp"}
        return [_EXPLAINED[kind] for kind in _EXPLAINED if kind in wrong]


def _holds(verdict: Verdict, cell: Cell) -> bool:
    return verdict.deviations.get(cell.name, 0.0) <= verdict.tolerance


def add_parser(subparsers: Any) -> None:
    """Add this subcommand to those of the command line."""
    parser = subparsers.add_parser(
        "verify",
        help="run a script's loss over several splits and layouts on the CPU, and compare",
        description=__doc__,
    )
    add = parser.add_argument
    add("--rollouts", type=Path, metavar="DIR",
        help="take the first batches of this rollout directory instead of made-up ones")
    add("--tolerance", type=float, default=1e-4,
        help="largest relative deviation that counts as equal (default: 1e-4)")
    add("--seed", type=int, default=0, help="of the made-up rollouts")
    add("--max-ranks", type=int, default=4, metavar="N",
        help="processes of the largest layout (default: 4)")
    add("--only", action="append", choices=KINDS, metavar="KIND",
        help=f"compare with runs of this kind alone (repeatable): {', '.join(KINDS)}")
    add("--timeout", type=float, default=300.0, metavar="SECONDS", help="for each run")
    add("script", type=Path, help="the pretrain script")
    add("arguments", nargs=argparse.REMAINDER,
        help="of the script; a tiny model is the default, sizes and paths of data are verify's")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Verify a script and print a table.

    Returns:
        0 if everything is invariant, 1 if not.

    Raises:
        ValueError: There is no such script or no rollouts.
    """
    if not args.script.is_file():
        raise ValueError(f"there is no file {str(args.script)!r} to run")
    batches = None if args.rollouts is None else read_batches(args.rollouts, num_batches=2)
    arguments = [a for a in args.arguments if a != "--"]
    result = verify(
        args.script, arguments, batches, kinds=args.only or KINDS,
        tolerance=args.tolerance, seed=args.seed, max_ranks=args.max_ranks, timeout=args.timeout,
        progress=lambda line: print(line, flush=True),
    )  # fmt: skip
    print(as_table(result))
    return 0 if result.invariant else 1


def verify(
    script: Path,
    arguments: Sequence[str] = (),
    batches: Sequence[Sequence[Sample]] | None = None,
    *,
    kinds: Sequence[str] = KINDS,
    tolerance: float = 1e-4,
    seed: int = 0,
    max_ranks: int = 4,
    timeout: float = 300.0,
    progress: Callable[[str], None] = lambda line: None,
) -> Verification:
    """Run every cell and compare it with the first.

    Args:
        script: The pretrain script.
        arguments: Its own arguments.
        batches: Rollouts, one step for each list; default: two made-up batches.
        kinds: Which kinds of cells to run.
        tolerance: Largest relative deviation that counts as equal.
        seed: Of the made-up rollouts.
        max_ranks: Processes of the largest layout.
        timeout: Seconds for each run.
        progress: Called with a line before each run.
    """
    given = made_up_batches(2, 5, seed) if batches is None else batches
    own = script_arguments(arguments)
    ranks_per_replica = _size_of(own, "tensor") * _size_of(own, "pipeline")
    cells = [
        c
        for c in plan_cells(given)
        if c.kind in ("reference", *kinds) and c.dp * c.cp * ranks_per_replica <= max_ranks
    ]
    result = Verification(cells)
    if "masked" in kinds and _counts_empty_samples(own):
        result.cells = [c for c in cells if c.kind != "masked"]
        result.notes.append(
            "under --loss-reduction sample, samples without trained tokens count in B; whether "
            "they do no other harm is checked with --empty-rollouts skip"
        )
    outcomes: dict[str, Outcome] = {}
    with tempfile.TemporaryDirectory(prefix="verify-") as name:
        folder = Path(name)
        (folder / "weights").mkdir()
        for number, cell in enumerate(result.cells):
            progress(f"run {number + 1} of {len(result.cells)}: {cell.name}")
            own_folder = folder / str(number)
            own_folder.mkdir()
            changed = [_changed(cell, batch) for batch in given]
            write_batches(own_folder / "rollouts", changed)
            argv = [*_TINY_MODEL, *own, *cell_arguments(cell, own_folder / "rollouts", changed)]
            world = cell.dp * cell.cp * ranks_per_replica
            outcome = run_cell(script, argv, world, own_folder, folder / "weights", timeout)
            if outcome.error is not None:
                result.errors[cell.name] = outcome.error
                if number == 0:
                    return result
            else:
                outcomes[cell.name] = outcome
    result.verdicts = compare(outcomes, tolerance)
    return result


def _changed(cell: Cell, batch: Sequence[Sample]) -> list[Sample]:
    if cell.kind == "masked":
        return with_masked_siblings(batch)
    return twice(batch) if cell.kind == "twice" else list(batch)


def plan_cells(batches: Sequence[Sequence[Sample]]) -> list[Cell]:
    """The cells for these rollouts: the first holds every sample of a step in one micro-batch."""
    longest = max(s.total_length for batch in batches for s in batch)
    tokens = max(sum(-(-s.total_length // 4) * 4 for s in batch) for batch in batches)
    small, large = _round_up(longest), _round_up(2 * tokens)
    half = _round_up(tokens // 2 + longest)
    return [
        Cell("one micro-batch", "reference", 1, 1, large),
        Cell("many micro-batches", "packing", 1, 1, small),
        Cell("few micro-batches", "packing", 1, 1, half),
        Cell("DP2", "dp", 2, 1, large),
        Cell("DP2, many", "dp", 2, 1, small),
        Cell("CP2", "cp", 1, 2, large // 2),
        Cell("DP2 x CP2, many", "cp", 2, 2, _round_up(small, 32) // 2),
        Cell("masked samples", "masked", 1, 1, large),
        Cell("rollouts twice", "twice", 1, 1, large),
    ]


def _round_up(tokens: int, multiple: int = 32) -> int:
    return -(-tokens // multiple) * multiple


def script_arguments(arguments: Sequence[str]) -> list[str]:
    """The user's arguments without those that verify decides."""
    kept: list[str] = []
    taken = False
    for argument in arguments:
        if argument.startswith("--"):
            taken = _TAKEN_AWAY.fullmatch(argument) is not None
        if not taken:
            kept.append(argument)
    return kept


def cell_arguments(
    cell: Cell, rollouts: Path, batches: Sequence[Sequence[Sample]]
) -> list[str]:
    """What verify adds to the command line for a cell."""
    total = sum(_num_rollouts(batch) for batch in batches)
    values = {
        "rollout-path": rollouts,
        "rollouts-per-step": "batch",
        "max-tokens-per-gpu": cell.max_tokens_per_gpu,
        "context-parallel-size": cell.cp,
        "train-samples": total,
        # Learned position embeddings must have the same size in every cell.
        "max-position-embeddings": 1 << 14,
        "eval-iters": 0,
        "eval-interval": 1000,
        "log-interval": 1,
    }
    flags = [word for name, value in values.items() for word in (f"--{name}", str(value))]
    return ["--dynamic-global-batch", *flags]


def _num_rollouts(batch: Sequence[Sample]) -> int:
    ids = [s.rollout_id for s in batch]
    return len({i for i in ids if i is not None}) + ids.count(None)


def _value_of(arguments: Sequence[str], name: str) -> str | None:
    value = None
    for place, argument in enumerate(arguments):
        flag, _, attached = argument.partition("=")
        if flag == name:
            value = attached or arguments[place + 1]
    return value


def _size_of(arguments: Sequence[str], kind: str) -> int:
    return int(_value_of(arguments, f"--{kind}-model-parallel-size") or 1)


def _counts_empty_samples(arguments: Sequence[str]) -> bool:
    by_sample = _value_of(arguments, "--loss-reduction") == "sample"
    return by_sample and _value_of(arguments, "--empty-rollouts") != "skip"


def compare(outcomes: Mapping[str, Outcome], tolerance: float) -> list[Verdict]:
    """Deviations of gradient and metrics of every cell from the first."""
    (first, reference), *others = outcomes.items()
    names = dict.fromkeys(
        name for outcome in outcomes.values() for step in outcome.metrics for name in step
    )
    verdicts = [
        Verdict(
            GRADIENT,
            _gradient_norm(reference),
            {cell: _gradient_deviation(outcome, reference) for cell, outcome in others},
            tolerance,
        )
    ]
    for name in names:
        deviations = {cell: _metric_deviation(name, o, reference) for cell, o in others}
        value = reference.metrics[0].get(name, np.nan)
        verdicts.append(Verdict(name, value, deviations, tolerance))
    return verdicts


def _gradient_norm(outcome: Outcome) -> float:
    tensors = (t for part in outcome.gradients[0].values() for t in part.values())
    return float(np.sqrt(sum(float(t.square().sum()) for t in tensors)))


def _gradient_deviation(outcome: Outcome, reference: Outcome) -> float:
    """Largest ‖difference‖ / ‖reference‖ over the steps, over all parameters together."""
    if len(outcome.gradients) != len(reference.gradients):
        return np.inf
    worst = 0.0
    for ours, theirs in zip(outcome.gradients, reference.gradients, strict=True):
        difference, scale = 0.0, 0.0
        for place, tensors in theirs.items():
            for name, tensor in tensors.items():
                difference += float((ours[place][name] - tensor).square().sum())
                scale += float(tensor.square().sum())
        worst = _worse(worst, np.sqrt(difference / scale) if scale else np.inf)
    return worst


def _metric_deviation(name: str, outcome: Outcome, reference: Outcome) -> float:
    if len(outcome.metrics) != len(reference.metrics):
        return np.inf
    worst = 0.0
    for ours, theirs in zip(outcome.metrics, reference.metrics, strict=True):
        if name not in ours or name not in theirs:
            return np.inf
        a, b = ours[name], theirs[name]
        if a != b and not (np.isnan(a) and np.isnan(b)):
            worst = _worse(worst, abs(a - b) / max(abs(b), SMALLEST_SCALE))
    return worst


def _worse(one: float, other: float) -> float:
    return max(one, np.inf if np.isnan(other) else float(other))


def as_table(result: Verification) -> str:
    """Deviations by quantity and cell, then the verdict and what to do."""
    cells = [c for c in result.cells[1:] if c.name not in result.errors]
    lines = []
    if result.verdicts:
        width = max(len(v.name) for v in result.verdicts) + 2
        lines.append(f"\ndeviation from {result.cells[0].name!r}; = is at most the tolerance")
        lines.append(" " * width + "  ".join(["     value", *(c.name for c in cells)]))
        for v in result.verdicts:
            entries = [_entry(v, c).rjust(len(c.name)) for c in cells]
            lines.append(v.name.ljust(width) + "  ".join([f"{v.value:10.3g}", *entries]))
    lines += [f"note: {note}" for note in result.notes]
    lines += [f"run {cell!r} failed: {error}" for cell, error in result.errors.items()]
    wrong = [v.name for v in result.verdicts if not v.invariant]
    if result.invariant:
        largest = max((d for v in result.verdicts for d in v.deviations.values()), default=0.0)
        lines.append(f"invariant: no quantity deviates by more than {largest:.1e}")
    elif wrong:
        lines.append(f"NOT invariant: {', '.join(wrong)}")
        lines += [f"  {reason}" for reason in result.reasons()]
        lines.append(_REMEDY)
    return "\n".join(lines)


def _entry(verdict: Verdict, cell: Cell) -> str:
    deviation = verdict.deviations[cell.name]
    return "=" if deviation <= verdict.tolerance else f"{deviation:.1e}"
