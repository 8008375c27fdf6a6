"""One parity cell: a whole Megatron training on every rank, and what it left behind.

The script runs as the launcher would run it; the cell's observer stands around Megatron's own
optimizer and log, so that what is compared is what Megatron itself saw.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from tests.harness import launch, row_of, watching
from tests.parity.architecture import Architecture
from tests.parity.reference import Recipe
from tests.pool import ROOT, run_ranks

STOCK_SCRIPT = ROOT / "examples" / "pretrain_gpt_sft.py"
OWN_SCRIPT = Path(__file__).parent / "own_script.py"


NOTES: list[Any] = []
"""What functions called from inside a training want to tell the test, on this rank."""


@dataclass(frozen=True)
class Cell:
    """What to train and how.

    Attributes:
        ranks: Processes.
        flags: Megatron's options by name, on top of architecture and recipe; True is a bare flag,
            None or False leaves it out, a tuple is several words.
        recipe: Gives the optimizer's and the schedule's flags.
        architecture: The model.
        script: Pretrain script.
        plugin: Whether the hooks are installed.
        overwrite_weights: Start from the architecture's initial parameters (not at a resume).
        prepare: Called on every rank before the script starts; picklable.
        exit_code: With which Megatron may end the process.
    """

    ranks: int = 1
    flags: Mapping[str, object] = field(default_factory=dict)
    recipe: Recipe = field(default_factory=Recipe)
    architecture: Architecture = field(default_factory=Architecture)
    script: Path = STOCK_SCRIPT
    plugin: bool = True
    overwrite_weights: bool = True
    prepare: Callable[[], None] | None = None
    exit_code: int = 0

    def argv(self) -> list[str]:
        """The script's command line."""
        flags = {
            **self.architecture.flags(),
            **self.recipe.flags(),
            **self.recipe.auxiliary.flags(self.architecture),
            "log-interval": 1,
            "eval-iters": 0,
            "eval-interval": 1000,
            **self.flags,
        }
        argv: list[str] = []
        for name, value in flags.items():
            if value is True:
                argv.append(f"--{name}")
            elif isinstance(value, tuple):
                argv += [f"--{name}", *map(str, value)]
            elif value is not None and value is not False:
                argv += [f"--{name}", str(value)]
        return argv


@dataclass
class Shard:
    """One rank's part of a tensor that has a global name.

    Attributes:
        values: The part.
        dim: Dimension that tensor parallelism splits; None if every rank has all of it.
        rank: Tensor-parallel rank.
        pieces: How many matrices are stacked along `dim`, each split on its own.
    """

    values: Tensor
    dim: int | None
    rank: int
    pieces: int


@dataclass
class Observed:
    """What one rank saw.

    Attributes:
        rows: One per logged iteration: iteration, learning_rate, grad_norm, consumed, and the
            reported losses where this rank has them (last pipeline stage).
        learning_rates: Used by each optimizer step.
        weight_decays: Used by each optimizer step, on matrices.
        gradients: For each optimizer step, global name → gradient before clipping.
        parameters: For each optimizer step, global name → value after it; where the next forward
            pass gathers them, as that pass left them.
        biases: For each optimizer step, the expert biases [E] of this rank's layers. Megatron
            updates them with the gradients, so these are the ones after it.
        cursors: For each logged iteration, the plugin's cursor as a checkpoint would keep it.
        lines: What Megatron printed on the last rank.
        notes: The rank's NOTES.
    """

    rows: list[dict[str, float]] = field(default_factory=list)
    learning_rates: list[float] = field(default_factory=list)
    weight_decays: list[float] = field(default_factory=list)
    gradients: list[dict[str, Shard]] = field(default_factory=list)
    parameters: list[dict[str, Shard]] = field(default_factory=list)
    biases: list[list[Tensor]] = field(default_factory=list)
    cursors: list[dict[str, Any]] = field(default_factory=list)
    lines: list[str] = field(default_factory=list)
    notes: list[Any] = field(default_factory=lambda: NOTES)


def run_cell(cell: Cell, timeout: float = 240.0) -> list[Observed]:
    """Train the cell on its ranks; what each rank saw, in rank order."""
    return run_ranks(cell.ranks, run_rank, cell, timeout=timeout)


def note_version() -> None:
    """Tell which Megatron this rank has."""
    from megatron.core.package_info import __version__

    NOTES.append(__version__)


def run_rank(cell: Cell) -> Observed:
    """The cell on this rank."""
    if cell.plugin:
        from megatron_dynbatch import hooks

        hooks.install()
    if cell.prepare is not None:
        cell.prepare()
    observed = Observed()
    with _observing(observed, cell):
        try:
            launch(cell.script, cell.argv())
        except SystemExit as end:  # --exit-interval, for example
            if (end.code or 0) != cell.exit_code:
                raise
        else:
            assert cell.exit_code == 0, f"Megatron did not end with exit code {cell.exit_code}"
    return observed


@contextlib.contextmanager
def _observing(observed: Observed, cell: Cell) -> Iterator[None]:
    """Keep what Megatron's loop, optimizer and log see; what is printed, for good."""
    from megatron.training import training

    show = training.print_rank_last

    def begin(model: list[Any], optimizer: Any) -> None:
        if cell.overwrite_weights:
            set_parameters(model, cell.architecture.initial_parameters())
            optimizer.reload_model_params()
        observe_optimizer(observed, model, optimizer)

    def logged(given: Mapping[str, Any]) -> None:
        observed.rows.append(row_of(given))
        observed.cursors.append(_cursor())

    def print_rank_last(line: str) -> None:
        observed.lines.append(line)
        show(line)

    def end(model: list[Any], optimizer: Any) -> None:
        if optimizer.config.overlap_param_gather:  # Megatron has gathered once more
            observed.parameters.append(shards_of(model))

    training.print_rank_last = print_rank_last
    with watching(before=begin, after=end, logged=logged):
        yield


def _cursor() -> dict[str, Any]:
    from megatron.training import get_args

    return dict(getattr(get_args(), "dynbatch_cursor", {}))


def observe_optimizer(observed: Observed, model: Sequence[Any], optimizer: Any) -> None:
    """Note what the optimizer is given and what it makes of it, at every step."""
    step = optimizer.step

    def observed_step(*args: Any, **kwargs: Any) -> Any:
        matrices = max(optimizer.param_groups, key=lambda group: group["weight_decay"])
        observed.learning_rates.append(float(matrices["lr"]))
        observed.weight_decays.append(float(matrices["weight_decay"]))
        is_gathered_later = optimizer.config.overlap_param_gather
        if is_gathered_later and observed.gradients:  # what the last step made
            observed.parameters.append(shards_of(model))
        with _whole_gradients(model, optimizer):
            observed.gradients.append(shards_of(model, lambda parameter: parameter.main_grad))
        observed.biases.append(_expert_biases(model))
        result = step(*args, **kwargs)
        if not is_gathered_later:
            observed.parameters.append(shards_of(model))
        return result

    optimizer.step = observed_step


def _expert_biases(model: Sequence[Any]) -> list[Tensor]:
    named = [pair for chunk in model for pair in chunk.named_buffers()]
    return [buffer.clone() for name, buffer in named if name.endswith("expert_bias")]


@contextlib.contextmanager
def _whole_gradients(model: Sequence[Any], optimizer: Any) -> Iterator[None]:
    """Within, every rank has whole gradients; the distributed optimizer leaves it its own part."""
    kept: list[tuple[Tensor, Tensor]] = []
    for chunk in model if optimizer.config.use_distributed_optimizer else ():
        for group in (*chunk.bucket_groups, *chunk.expert_parallel_bucket_groups):
            instance = group.intra_distributed_optimizer_instance_group
            for bucket in group.buckets:
                kept.append((bucket.grad_data, bucket.grad_data.clone()))
                own = bucket.grad_data.chunk(instance.size())[instance.rank()].clone()
                dist.all_gather_into_tensor(bucket.grad_data, own, group=instance)
    try:
        yield
    finally:
        for gradients, values in kept:
            gradients.copy_(values)


def set_parameters(model: Sequence[Any], values: Mapping[str, Tensor]) -> None:
    """Give every parameter its part of the unsharded value of its global name."""
    from tests.cpu.weights import cut, global_parameters

    with torch.no_grad():
        for name, parameter in global_parameters(model):
            size, rank = _tensor_parallel(parameter)
            parameter.copy_(cut(values[name], parameter, size, rank))


def shards_of(
    model: Sequence[Any], read: Callable[[Any], Tensor] = lambda parameter: parameter.data
) -> dict[str, Shard]:
    """This rank's part of what `read` finds at every parameter, by global name."""
    from tests.cpu.weights import global_parameters

    shards = {}
    parameter: Any  # a Tensor with Megatron's partition attributes
    for name, parameter in global_parameters(model):
        size, rank = _tensor_parallel(parameter)
        dim = parameter.partition_dim if size > 1 else None
        pieces = parameter.partition_stride if size > 1 else 1
        shards[name] = Shard(read(parameter).detach().clone(), dim, rank, pieces)
    return shards


def _tensor_parallel(parameter: Any) -> tuple[int, int]:
    from megatron.core import mpu

    if not getattr(parameter, "tensor_model_parallel", False):
        return 1, 0
    return mpu.get_tensor_model_parallel_world_size(), mpu.get_tensor_model_parallel_rank()


def assemble(parts: Sequence[Mapping[str, Shard]]) -> dict[str, Tensor]:
    """Whole tensors by global name, from all ranks' shards of one step.

    Raises:
        AssertionError: Ranks that should hold the same shard differ.
    """
    found: dict[str, dict[int, Shard]] = {}
    for part in parts:
        for name, shard in part.items():
            twin = found.setdefault(name, {}).setdefault(shard.rank, shard)
            if twin is shard:
                continue
            difference = (twin.values - shard.values).abs().max().item()
            assert difference <= 1e-6 * (1 + twin.values.abs().max().item()), (
                f"{name} differs by {difference} between ranks that replicate it"
            )
    return {name: _joined([shards[r] for r in sorted(shards)]) for name, shards in found.items()}


def _joined(shards: Sequence[Shard]) -> Tensor:
    dim = shards[0].dim
    if dim is None:
        return shards[0].values
    pieces = [shard.values.chunk(shard.pieces, dim) for shard in shards]
    return torch.cat([torch.cat(piece, dim) for piece in zip(*pieces, strict=True)], dim)
