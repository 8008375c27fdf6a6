"""The parallel layout of a training job, as far as planning and packing need it."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from megatron_dynbatch.errors import PlanError
from megatron_dynbatch.geometry.zigzag import num_chunks
from megatron_dynbatch.wording import short

FP8_TOKEN_MULTIPLE = {None: 1, "fp8": 16, "mxfp8": 32}

MAX_SIZE = 1 << 16
"""Ranks of a layout, and micro-batches of its smallest step; more is taken for damage."""


@dataclass(frozen=True)
class ParallelLayout:
    """How ranks are arranged.

    Attributes:
        dp: Data-parallel size without context parallelism.
        cp: Context-parallel size.
        tp: Tensor-parallel size.
        pp: Pipeline-parallel size.
        vpp: Model chunks per pipeline stage; 1 is the plain 1F1B schedule.
        vpp_group: Micro-batches run contiguously per chunk
            (`--microbatch-group-size-per-virtual-pipeline-stage`); None is Megatron's default, pp.
        ep: Expert-parallel size.
        sequence_parallel: Activations are split over TP along the sequence.
        fp8: None, "fp8" or "mxfp8"; they need token counts in multiples of 16 and 32 per CP rank.
    """

    dp: int = 1
    cp: int = 1
    tp: int = 1
    pp: int = 1
    vpp: int = 1
    vpp_group: int | None = None
    ep: int = 1
    sequence_parallel: bool = False
    fp8: str | None = None

    def __post_init__(self) -> None:
        sizes = {name: getattr(self, name) for name in ("dp", "cp", "tp", "pp", "vpp", "ep")}
        if self.vpp_group is not None:
            sizes["vpp_group"] = self.vpp_group
        for name, value in sizes.items():
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise PlanError(f"layout: {name} must be a positive int, got {short(value)}")
        largest = max(self.dp * self.group, self.cp * self.tp * self.pp * self.vpp, self.ep)
        if largest > MAX_SIZE:
            raise PlanError(
                f"layout: {short(sizes)} is more than {MAX_SIZE} ranks or micro-batches"
            )
        if not isinstance(self.sequence_parallel, bool):
            raise PlanError(f"layout: sequence_parallel is {short(self.sequence_parallel)}")
        if self.fp8 not in tuple(FP8_TOKEN_MULTIPLE):
            raise PlanError(f"layout: fp8 must be None, 'fp8' or 'mxfp8', got {short(self.fp8)}")
        if self.vpp > 1 and self.pp == 1:
            raise PlanError(f"layout: vpp={self.vpp} needs pp > 1")
        if self.vpp_group is not None and self.vpp_group < self.pp:
            raise PlanError(
                f"layout: vpp_group={self.vpp_group} must be at least pp={self.pp} "
                "(--microbatch-group-size-per-virtual-pipeline-stage)"
            )

    @property
    def dp_cp(self) -> int:
        """Data-parallel size with context parallelism, over which Megatron averages gradients."""
        return self.dp * self.cp

    @property
    def group(self) -> int:
        """Micro-batches run contiguously per model chunk of the interleaved schedule."""
        return self.pp if self.vpp_group is None else self.vpp_group

    @property
    def sample_multiple(self) -> int:
        """A sample is laid out as a multiple of this many tokens (zigzag: 2 chunks per CP rank)."""
        return num_chunks(self.cp)

    @property
    def micro_batch_multiple(self) -> int:
        """A micro-batch is laid out as a multiple of this many tokens."""
        shards = 2 * self.cp * self.tp if self.sequence_parallel else 1
        fp8 = FP8_TOKEN_MULTIPLE[self.fp8]
        return math.lcm(self.sample_multiple, shards, fp8 * self.cp if fp8 > 1 else 1)

    @property
    def lockstep_ranks(self) -> int:
        """DP ranks that run in lock-step: those of one expert-parallel group.

        Megatron numbers expert-parallel ranks along context, then data parallelism.
        """
        return min(self.dp, -(-self.ep // self.cp))

    def admits(self, num_microbatches: int) -> bool:
        """Whether Megatron's schedule accepts this count per DP rank.

        The interleaved schedule (`forward_backward_pipelining_with_interleaving`) wants
        M >= group and a last group that is full or holds at least pp micro-batches.
        """
        if self.vpp == 1:
            return num_microbatches >= 1
        last = num_microbatches % self.group
        return num_microbatches >= self.group and (last == 0 or last >= self.pp)

    def next_admissible(self, num_microbatches: int) -> int:
        """The smallest count that is at least `num_microbatches` and that `admits` accepts."""
        count = max(1, num_microbatches)
        if self.vpp == 1:
            return count
        count = max(count, self.group)
        last = count % self.group
        return count if last == 0 else count - last + max(last, self.pp)

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON types; `ParallelLayout(**d)` is the way back."""
        return dict(self.__dict__)
