"""``megatron-dynbatch verify``: is a script's loss the same however its data are split?"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from megatron_dynbatch.cli.verify_arguments import (
    TINY_MODEL,
    cell_arguments,
    counts_empty_samples,
    plan_cells,
    script_arguments,
    size_of,
)
from megatron_dynbatch.cli.verify_cells import Cell, Job, Outcome, RankPool
from megatron_dynbatch.cli.verify_factors import (
    MISSED,
    factors,
    has_siblings,
    separates_siblings,
)
from megatron_dynbatch.cli.verify_result import KINDS, Verification, as_table, compare
from megatron_dynbatch.cli.verify_rollouts import (
    made_up_batches,
    read_batches,
    twice,
    with_masked_siblings,
    write_batches,
)
from megatron_dynbatch.rollouts import Sample

DESCRIPTION = """\
Runs a pretrain script of your own on a few small rollouts, with the real Megatron on the CPU, under
several splits into micro-batches, data- and context-parallel sizes, and compares the gradient and
every reported metric of every step. Two more runs change the data in a way that must not matter:
samples without a trained token, and every rollout twice. With --model, the first step of a script
is run as it is launched, on GPUs or with --cpu, and compared with each sample alone and unpacked.
Exit code 1 if anything differs, or if the rollouts leave something untested.
"""
EXAMPLES = """\
  megatron-dynbatch verify examples/custom_loss.py
  megatron-dynbatch verify --only packing my_script.py --loss-reduction token
  megatron-dynbatch verify --rollouts DIR --tolerance 1e-5 my_script.py --num-layers 4
  torchrun --nproc-per-node 8 -m megatron_dynbatch.cli.main verify --model my_script.py \\
      --dynamic-global-batch --rollout-path DIR ...        # all flags of the training"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of the subcommand."""
    add = parser.add_argument
    add("--rollouts", type=Path, metavar="DIR",
        help="take the first batches of this rollout directory instead of made-up ones")
    add("--model", action="store_true",
        help="run one step as it is launched (torchrun), and compare loss and every gradient with "
        "those of each sample alone, of another packing, and with dummies")
    add("--cpu", action="store_true", help="with --model: on the CPU; else verify always is")
    add("--tolerance", type=float,
        help="largest relative deviation that counts as equal (default: 1e-4; with --model and "
        "half precision, what its rounding allows)")
    add("--seed", type=int, default=0, help="of the made-up rollouts")
    add("--max-ranks", type=int, default=4, metavar="N",
        help="processes of the largest layout (default: 4)")
    add("--only", action="append", choices=KINDS, metavar="KIND",
        help=f"compare with runs of this kind alone (repeatable): {', '.join(KINDS)}")
    add("--timeout", type=float, default=300.0, metavar="SECONDS", help="for each run")
    add("script", type=Path, help="the pretrain script")
    add("arguments", nargs=argparse.REMAINDER,
        help="of the script; a tiny model is the default, sizes and paths of data are verify's")


def run(args: argparse.Namespace) -> int:
    """Verify a script and print a table.

    Returns:
        0 if everything is invariant, 1 if not, or if something was not tested.

    Raises:
        ValueError: There is no such script or no rollouts.
    """
    if args.model:
        from megatron_dynbatch.cli import verify_model

        return verify_model.run(args)
    from megatron_dynbatch.report.progress import ProgressLine  # imports torch

    if not args.script.is_file():
        raise ValueError(f"there is no file {str(args.script)!r} to run")
    batches = None if args.rollouts is None else read_batches(args.rollouts, num_batches=2)
    arguments = [a for a in args.arguments if a != "--"]
    line = ProgressLine(sys.stdout)

    def show(number: int, total: int, name: str) -> None:
        if line.draws_bars:
            line.show([("run", number, total)], name)
        else:
            print(f"run {number} of {total}: {name}", flush=True)

    result = verify(
        args.script, arguments, batches, kinds=args.only or KINDS,
        tolerance=args.tolerance or 1e-4, seed=args.seed, max_ranks=args.max_ranks,
        timeout=args.timeout, progress=show,
    )  # fmt: skip
    line.clear()
    print(as_table(result))
    return 0 if result.proves_it else 1


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
    progress: Callable[[int, int, str], None] = lambda number, total, name: None,
    pool: RankPool | None = None,
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
        progress: Called before each run with its number, the number of runs, and its name.
        pool: Processes that run the cells; default: new ones for each cell.
    """
    pool = pool or RankPool(timeout)
    given = made_up_batches(2, 5, seed) if batches is None else batches
    own = script_arguments(arguments)
    ranks_per_replica = _ranks_per_replica(own)
    cells = [c for c in plan_cells(given, own) if c.kinds <= set(kinds)]
    result = Verification([c for c in cells if c.dp * c.cp * ranks_per_replica <= max_ranks])
    if "masked" in kinds and counts_empty_samples(own):
        kinds = [kind for kind in kinds if kind != "masked"]
        result.cells = [c for c in result.cells if "masked" not in c.kinds]
        result.notes.append(
            "under --loss-reduction sample, samples without trained tokens count in B; whether "
            "they do no other harm is checked with --empty-rollouts skip"
        )
    outcomes: dict[str, Outcome] = {}
    with tempfile.TemporaryDirectory(prefix="verify-") as name:
        (Path(name) / "weights").mkdir()
        for number, cell in enumerate(result.cells):
            progress(number + 1, len(result.cells), cell.name)
            job = _job(script, own, cell, given, Path(name) / str(number))
            outcome = pool.run(job)
            if outcome.error is None:
                outcomes[cell.name] = outcome
                continue
            result.errors[cell.name] = outcome.error
            if number == 0:
                return result
    result.verdicts = compare(outcomes, tolerance)
    reference = outcomes[cells[0].name]
    result.changed = {
        c.name: factors(c, outcomes[c.name], reference)
        for c in result.cells[1:]
        if c.name in outcomes
    }
    result.untested = _untested(result, kinds, given, outcomes, ranks_per_replica)
    return result


def _untested(
    result: Verification,
    kinds: Sequence[str],
    given: Sequence[Sequence[Sample]],
    outcomes: Mapping[str, Outcome],
    ranks_per_replica: int,
) -> dict[str, str]:
    """What no run that succeeded has changed, and why."""
    changed = frozenset().union(*result.changed.values())
    failed = frozenset().union(*(c.kinds for c in result.cells if c.name in result.errors))
    untested = {kind: MISSED[kind] for kind in kinds if kind not in changed | failed}
    for kind in untested:
        if not any(kind in c.kinds for c in result.cells):
            untested[kind] = f"it takes {2 * ranks_per_replica} processes; raise --max-ranks"
    splits = [
        outcomes[c.name].splits
        for c in result.cells
        if c.name in outcomes and not c.kinds & {"masked", "twice"}
    ]
    separated = any(any(map(separates_siblings, steps, given)) for steps in splits)
    if "packing" in changed & set(kinds) and any(map(has_siblings, given)) and not separated:
        untested["siblings"] = MISSED["siblings"]
    return untested


def _job(
    script: Path, own: list[str], cell: Cell, given: Sequence[Sequence[Sample]], folder: Path
) -> Job:
    """The run of a cell, its rollouts written to a new folder beside that of the weights."""
    folder.mkdir()
    batches = [_changed(cell, batch) for batch in given]
    write_batches(folder / "rollouts", batches)
    argv = (*TINY_MODEL, *own, *cell_arguments(cell, folder / "rollouts", batches))
    world = cell.dp * cell.cp * _ranks_per_replica(own)
    return Job(script, argv, world, folder, folder.parent / "weights")


def _ranks_per_replica(own: Sequence[str]) -> int:
    return size_of(own, "tensor") * size_of(own, "pipeline")


def _changed(cell: Cell, batch: Sequence[Sample]) -> list[Sample]:
    if "masked" in cell.kinds:
        return with_masked_siblings(batch)
    return twice(batch) if "twice" in cell.kinds else list(batch)
