"""``verify --model``: one step of a script as it is launched, against each sample alone."""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from megatron_dynbatch.cli.model_result import ModelVerification, as_table, compare
from megatron_dynbatch.cli.verify_rollouts import LONGEST, made_up_batches, write_batches
from megatron_dynbatch.run import Launch, prepare, run_target, seen_by_target

SINGLE = 1e-4
"""Tolerance in float32 and float64."""
UNITS_OF_HALF = 4
"""Tolerance in bfloat16 and float16, in units of their last digit (2⁻⁷ and 2⁻¹⁰)."""
_PATIENCE = 120.0


def run(args: argparse.Namespace) -> int:
    """Run the script's first step in several ways on the ranks of this job, and print a table.

    Returns:
        0 if nothing deviates, 1 if something does or was not tested.

    Raises:
        ValueError: There is no such script, or it ended before a training step.
    """
    if not args.script.is_file():
        raise ValueError(f"there is no file {str(args.script)!r} to run")
    given = [argument for argument in args.arguments if argument != "--"]
    with tempfile.TemporaryDirectory(prefix="verify-model-") as own:
        argv = [*given, *_made_up(given, args, Path(own))]
        launch = Launch(str(args.script), False, tuple(argv), cpu=args.cpu)
        with seen_by_target(launch):
            prepare(args.cpu)
            result = measure(launch, args.tolerance)
        import torch.distributed as dist

        if dist.get_rank() == 0:
            print(as_table(result), flush=True)
        dist.barrier()  # the folder of rollouts goes when all have read it
    return 0 if result.proves_it else 1


def measure(launch: Launch, tolerance: float | None = None) -> ModelVerification:
    """The first step of a script, its hooks installed, compared over the ranks of this job.

    Args:
        launch: The script and its whole command line.
        tolerance: Largest deviation that counts as equal; None: what the precision allows.
    """
    from megatron_dynbatch.cli.model_runs import StepMeasured, measuring_first_step
    from megatron_dynbatch.hooks.session import end_session

    try:
        with measuring_first_step():
            run_target(launch)
    except StepMeasured as done:
        from megatron.training import get_args

        if tolerance is None:
            tolerance = _tolerance(get_args())
        result = compare(done.ways, done.found, tolerance)
        end_session()
        return result
    raise ValueError(
        f"{launch.target} ended before a training step: give --dynamic-global-batch and rollouts"
    )


def _tolerance(args: argparse.Namespace) -> float:
    import torch

    if args.params_dtype in (torch.bfloat16, torch.float16):
        return UNITS_OF_HALF * float(torch.finfo(args.params_dtype).eps)
    return SINGLE


def _made_up(given: Sequence[str], args: argparse.Namespace, own: Path) -> list[str]:
    """Flags of made-up rollouts where the command line names none; rank 0 writes them."""
    named = any(argument.split("=")[0] == "--rollout-path" for argument in given)
    if args.rollouts is None and named:
        return []
    path = args.rollouts or _made_up_rollouts(own, args.seed)
    flags = ["--dynamic-global-batch"] * ("--dynamic-global-batch" not in given)
    flags += ["--rollout-path", str(path)]
    for name, value in (("--rollouts-per-step", "batch"), ("--max-tokens-per-gpu", 2 * LONGEST)):
        if not any(argument.split("=")[0] == name for argument in given):
            flags += [name, str(value)]
    return flags


def _made_up_rollouts(own: Path, seed: int) -> Path:
    """The folder that rank 0 fills and all ranks of this machine find by the job's address."""
    job = os.environ.get("MASTER_PORT", str(os.getpid()))
    place = Path(tempfile.gettempdir()) / f"verify-model-{os.getuid()}-{job}"
    if int(os.environ.get("RANK", "0")) == 0:
        write_batches(own / "rollouts", made_up_batches(1, 5, seed))
        place.unlink(missing_ok=True)
        place.symlink_to(own / "rollouts")
    _wait_for(place)
    return place


def _wait_for(path: Path) -> None:
    deadline = time.monotonic() + _PATIENCE
    while not path.exists():
        if time.monotonic() > deadline:
            raise ValueError(
                f"rank 0 wrote no rollouts to {path}: on several machines give --rollout-path"
            )
        time.sleep(0.05)
