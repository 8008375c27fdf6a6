"""`MicroBatch`: what one context-parallel rank runs forward and backward at once, as tensors."""

import functools
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from megatron_dynbatch.geometry import PackLayout
from megatron_dynbatch.geometry.ragged import Int64
from megatron_dynbatch.layout.packed_sequence import PackedSequence, pack_samples
from megatron_dynbatch.plan.types import Plan, StepPlan
from megatron_dynbatch.reduce.segment_table import SegmentTable, table_of
from megatron_dynbatch.reduce.weighted_sum import weighted_sums
from megatron_dynbatch.rollouts.sample import Sample

if TYPE_CHECKING:
    from megatron.core.packed_seq_params import PackedSeqParams


@dataclass(frozen=True, eq=False)
class MicroBatch:
    """B samples (none: a dummy) as this context-parallel rank's part of a packed sequence.

    Tensors hold the rank's T_local = S / C tokens in zigzag order. The entry at a token of labels,
    masks, weights and columns belongs to the prediction of the token that follows it.

    Attributes:
        tokens: int64 [1, T_local].
        labels: int64 [1, T_local].
        position_ids: int64 [1, T_local].
        loss_mask: float32 [1, T_local], 0 or 1.
        padding_mask: bool [1, T_local], True at padding.
        token_weights: float64 [T_local], mask ÷ denominator.
        cu_seqlens: int32 [n+1] of the full sequence, cumulative lengths without padding.
        cu_seqlens_padded: int32 [n+1] of the full sequence, cumulative lengths as laid out.
        columns: name → float32 [1, T_local]: advantages, log_probs, ref_log_probs,
            rollout_log_probs, values, returns, as far as the samples have them.
        sample_rows: Plan rows of the samples, [B].
        sample_denoms: float64 [B], on the host.
        pack: Where each token of the full sequence lies, on the host.
        step: The step this micro-batch belongs to (its G, B, M).
        dp_rank: Data-parallel rank, without context parallelism.
        cp_rank: Context-parallel rank.
        summed: Name → values of the T_local tokens of what was summed last, kept so that a NaN in
            the loss can be traced to its sample.
    """

    tokens: Tensor
    labels: Tensor
    position_ids: Tensor
    loss_mask: Tensor
    padding_mask: Tensor
    token_weights: Tensor
    cu_seqlens: Tensor
    cu_seqlens_padded: Tensor
    columns: dict[str, Tensor]
    sample_rows: tuple[int, ...]
    sample_denoms: NDArray[np.float64]
    pack: PackLayout
    step: StepPlan
    dp_rank: int
    cp_rank: int
    summed: dict[str, Tensor] = field(default_factory=dict, init=False, repr=False)

    @property
    def cp_size(self) -> int:
        """Context-parallel size C of this micro-batch."""
        return self.pack.cp_size

    @property
    def max_seqlen(self) -> int:
        """Longest laid-out sequence, in tokens of the full sequence."""
        return self.pack.max_seqlen

    @property
    def total_lengths(self) -> Int64:
        """int64 [B], tokens of each sample, on the host."""
        return self.pack.total_lengths

    @property
    def response_lengths(self) -> Int64:
        """int64 [B], response tokens of each sample, on the host."""
        return self.pack.response_lengths

    @property
    def num_tokens(self) -> int:
        """T_local, padding included."""
        return self.tokens.shape[1]

    @property
    def is_dummy(self) -> bool:
        """Whether this micro-batch exists only so that every rank runs the same number."""
        return not self.sample_rows

    @cached_property
    def untrained(self) -> Tensor:
        """bool [1, T_local], True where the loss mask is 0."""
        return self.loss_mask == 0

    @cached_property
    def float_weights(self) -> Tensor:
        """`token_weights` as float32 [1, T_local]."""
        return self.token_weights.to(torch.float32)[None]

    @cached_property
    def segments(self) -> SegmentTable:
        """Where each sample's response lies in the local tensors (for `segment_sums`)."""
        return table_of(self.pack.response_pieces(self.cp_rank))

    def sample_positions(self) -> tuple[Int64, Int64]:
        """For each local token: place of its sample in `sample_rows`, and position in the sample.

        Padding behind the samples has places from B upward.
        """
        pack = self.pack
        return (
            pack.local(pack.sample_of_row, self.cp_rank),
            pack.local(pack.position_ids, self.cp_rank),
        )

    def column(self, name: str) -> Tensor:
        """A column as [T_local].

        Raises:
            ValueError: The samples do not have it.
        """
        if name not in self.columns:
            there = ", ".join(self.columns) or "none"
            raise ValueError(f"the samples of this micro-batch have no {name}; columns: {there}")
        return self.columns[name].reshape(-1)

    def mean(self, x: Tensor) -> Tensor:
        """This micro-batch's part of the step's mean of x: Σ w·x over local tokens.

        Args:
            x: [T_local], [1, T_local] or [T_local, 1] per-token values; anything may stand where
                the loss mask is 0.

        Returns:
            0-d float64, differentiable in x. Summed over micro-batches and DP×CP ranks and divided
            by the step's B it is the mean.

        Raises:
            ValueError: x has another shape.
        """
        return self.sums({"x": x})["x"]

    def sums(self, values: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """`mean` of several values in one fused call: name → 0-d float64 Σ w·x."""
        if not values:
            return {}
        rows = [self._row(name, x) for name, x in values.items()]
        self.summed.update(zip(values, (row.detach() for row in rows), strict=True))
        dtype = functools.reduce(torch.promote_types, [row.dtype for row in rows])
        stacked = torch.stack([row.to(dtype) for row in rows])
        return dict(zip(values, weighted_sums(stacked, self.token_weights).unbind(), strict=True))

    def _row(self, name: str, x: Tensor) -> Tensor:
        length = self.num_tokens
        if tuple(x.shape) not in ((length,), (1, length), (length, 1)):
            raise ValueError(
                f"{name} has shape {list(x.shape)}, expected one value per local token: "
                f"[{length}], [1, {length}] or [{length}, 1]"
            )
        return x.reshape(-1) if x.dtype.is_floating_point else x.reshape(-1).to(torch.float64)

    def packed_seq_params(self) -> "PackedSeqParams":
        """Megatron's description of the packing, for `GPTModel.forward`."""
        from megatron.core.packed_seq_params import PackedSeqParams

        # cu_seqlens_q too holds laid-out lengths: the roll of multi-token prediction reads only it.
        cu = self.cu_seqlens_padded
        return PackedSeqParams(
            qkv_format="thd",
            cu_seqlens_q=cu,
            cu_seqlens_kv=cu,
            cu_seqlens_q_padded=cu,
            cu_seqlens_kv_padded=cu,
            max_seqlen_q=self.max_seqlen,
            max_seqlen_kv=self.max_seqlen,
        )


def pack_micro_batch(
    plan: Plan,
    step_index: int,
    dp_rank: int,
    k: int,
    samples: Mapping[int, Sample],
    *,
    width: int | None = None,
    columns: Collection[str] | None = None,
) -> PackedSequence:
    """Packs micro-batch k of a DP rank as a full sequence; arguments as `build_micro_batch`."""
    rows = plan.steps[step_index].micro_batches[dp_rank][k]
    denoms = plan.sample_denoms[list(rows)]
    return pack_samples(samples, rows, denoms, plan.layout, width=width, columns=columns)


def build_micro_batch(
    plan: Plan,
    step_index: int,
    dp_rank: int,
    k: int,
    samples: Mapping[int, Sample],
    *,
    cp_rank: int = 0,
    width: int | None = None,
    columns: Collection[str] | None = None,
    device: torch.device | str = "cpu",
) -> MicroBatch:
    """Builds micro-batch k of a step on one rank.

    Args:
        plan: The plan of the batch.
        step_index: Which of its steps.
        dp_rank: Data-parallel rank, without context parallelism.
        k: Which of the rank's M micro-batches.
        samples: plan row → sample; only this micro-batch's rows need be there.
        cp_rank: Context-parallel rank.
        width: Lay out at exactly this many tokens (the full sequence); default: as short as
            the layout allows.
        columns: Per-token columns to lay out; default: those the samples have. A dummy has all
            of them, as zeros, so that a loss reads the same columns on every rank.
        device: Where the tensors go.

    Raises:
        ValueError: See `pack_samples`.
    """
    packed = pack_micro_batch(plan, step_index, dp_rank, k, samples, width=width, columns=columns)
    return slice_packed(packed, plan.steps[step_index], dp_rank, cp_rank, device=device)


def slice_packed(
    packed: PackedSequence,
    step: StepPlan,
    dp_rank: int,
    cp_rank: int,
    *,
    device: torch.device | str = "cpu",
) -> MicroBatch:
    """One context-parallel rank's part of a packed sequence, as tensors on `device`."""
    pack = packed.pack
    on_host = torch.device(device).type == "cpu"

    def tensor(array: NDArray[Any]) -> Tensor:
        made = torch.from_numpy(array)
        return made if on_host else made.to(device, non_blocking=True)

    def row(array: NDArray[Any]) -> Tensor:
        return tensor(pack.local(array, cp_rank)[None])

    return MicroBatch(
        tokens=row(packed.tokens),
        labels=row(packed.labels),
        position_ids=row(pack.position_ids),
        loss_mask=row(packed.loss_mask),
        padding_mask=row(packed.padding_mask),
        token_weights=tensor(pack.local(packed.token_weights, cp_rank)),
        cu_seqlens=tensor(pack.cu_seqlens),
        cu_seqlens_padded=tensor(pack.cu_seqlens_padded),
        columns={name: row(column) for name, column in packed.columns.items()},
        sample_rows=packed.sample_rows,
        sample_denoms=packed.sample_denoms,
        pack=pack,
        step=step,
        dp_rank=dp_rank,
        cp_rank=cp_rank,
    )
