"""One optimizer step on one rank: its plan and its data."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor, Future
from dataclasses import fields, replace
from functools import cached_property
from typing import Any

import numpy as np
import torch

from megatron_dynbatch.layout.micro_batch import MicroBatch, pack_micro_batch, slice_packed
from megatron_dynbatch.layout.packed_sequence import PackedSequence
from megatron_dynbatch.layout.stock import stock_batch
from megatron_dynbatch.plan import Plan, StepPlan
from megatron_dynbatch.rollouts import Sample
from megatron_dynbatch.wording import counted

type HostBatch = tuple[PackedSequence, MicroBatch, dict[str, torch.Tensor]]
"""A micro-batch as a full sequence, as this rank's part, and in Megatron's SFT contract."""


class Step:
    """One optimizer step on this rank: its plan, its data, and how far the data was built.

    Args:
        plan: Plan of the batch.
        step_index: Which of its steps.
        batch_id: The rollout batch.
        dp_rank: Data-parallel rank whose micro-batches these are.
        cp_rank: Context-parallel rank, for the slice of each micro-batch.
        samples: Plan row → sample, for the rows of this DP rank.
        width: Laid-out tokens of every micro-batch, or None for each its own length.
        device: Where tensors go.
        origins: (batch, row) of each plan row; None: those of `batch_id`.

    Attributes:
        wait_seconds: How long the training waited for this step to open.
    """

    def __init__(
        self,
        plan: Plan,
        step_index: int,
        batch_id: int,
        *,
        dp_rank: int,
        cp_rank: int,
        samples: Mapping[int, Sample],
        width: int | None,
        device: torch.device | str,
        origins: Sequence[tuple[int, int]] | None = None,
    ) -> None:
        self.plan = plan
        self.step_index = step_index
        self.batch_id = batch_id
        self.dp_rank = dp_rank
        self.cp_rank = cp_rank
        self.samples = samples
        self.width = width
        self.device = torch.device(device)
        self.wait_seconds = 0.0
        self._origins = origins
        self._on_host: dict[int, Future[HostBatch]] = {}
        self._ready: dict[int, HostBatch] = {}
        self._built: dict[int, MicroBatch] = {}

    @property
    def step_plan(self) -> StepPlan:
        """The plan of this step alone."""
        return self.plan.steps[self.step_index]

    def sample_name(self, row: int) -> str:
        """What a plan row is called in messages: its place in the rollout files, its rollout."""
        batch, own_row = (self.batch_id, row) if self._origins is None else self._origins[row]
        rollout = int(self.plan.index.rollout_ids[row])
        named = "a rollout of its own" if rollout < 0 else f"rollout {rollout}"
        return f"row {own_row} of rollout batch {batch} ({named})"

    @property
    def step_global_batch_size(self) -> int:
        """G: rollouts of the step."""
        return self.step_plan.step_global_batch_size

    @cached_property
    def num_tokens(self) -> int:
        """T: tokens of the step's samples over all ranks, padding not counted."""
        return int(self.plan.index.total_lengths[self.step_plan.samples].sum())

    @property
    def num_microbatches(self) -> int:
        """M: micro-batches that every DP rank runs, dummies included."""
        return self.step_plan.num_microbatches

    def micro_batch(self, k: int) -> MicroBatch:
        """Micro-batch ``k`` of this rank, 0 ≤ k < M, as tensors; built once.

        Raises:
            IndexError: There is no micro-batch ``k``.
        """
        if k not in self._built:
            self._built[k] = _moved(self._host_batch(k)[1], self.device)
        return self._built[k]

    def stock_batch(self, k: int) -> dict[str, torch.Tensor]:
        """Micro-batch ``k`` of this rank in Megatron's SFT batch contract, before the CP slice.

        Raises:
            IndexError: There is no micro-batch ``k``.
        """
        return dict(self._host_batch(k)[2])

    def packed(self, k: int) -> PackedSequence:
        """Micro-batch ``k`` of this rank as a full sequence on the host.

        Raises:
            IndexError: There is no micro-batch ``k``.
        """
        return self._host_batch(k)[0]

    def extra(self, k: int, name: str) -> torch.Tensor:
        """An array of the samples' own (`token_arrays`, `response_arrays`) for micro-batch ``k``.

        Returns:
            [T_local, …] in the order of the micro-batch's tokens, 0 elsewhere. A token array has
            the entry of each token at it, a response array at the position that predicts it.

        Raises:
            IndexError: There is no micro-batch ``k``.
            ValueError: No sample of this rank has such an array.
        """
        packed = self.packed(k)
        full = _laid_out(packed, self.samples, name)
        return torch.from_numpy(packed.pack.local(full, self.cp_rank)).to(self.device)

    def pack_ahead(self, executor: Executor) -> None:
        """Let `executor` make all micro-batches on the host, in order."""
        missing = [k for k in range(self.num_microbatches) if k not in self._on_host]
        if missing:
            self._on_host |= {k: Future() for k in missing}
            executor.submit(self._fulfil, missing)

    def _fulfil(self, numbers: Sequence[int]) -> None:
        for k in numbers:
            try:
                self._on_host[k].set_result(self._make_on_host(k))
            except Exception as error:
                self._on_host[k].set_exception(error)

    def _host_batch(self, k: int) -> HostBatch:
        if k in self._ready:
            return self._ready[k]
        if k not in self._on_host:
            if not 0 <= k < self.num_microbatches:
                raise IndexError(
                    f"step {self.step_index} of rollout batch {self.batch_id} has "
                    f"{counted(self.num_microbatches, 'micro-batch')} on DP rank {self.dp_rank}; "
                    f"micro-batch {k} was asked for"
                )
            self._on_host[k] = Future()
            self._fulfil([k])
        self._ready[k] = self._on_host[k].result()
        return self._ready[k]

    def _make_on_host(self, k: int) -> HostBatch:
        packed = pack_micro_batch(
            self.plan, self.step_index, self.dp_rank, k, self.samples, width=self.width
        )
        local = slice_packed(packed, self.step_plan, self.dp_rank, self.cp_rank)
        stock = stock_batch(packed)
        if self.device.type == "cuda":
            local = _changed(local, lambda tensor: tensor.pin_memory())
            if self.width is not None:  # a stock script reads it
                stock = {name: tensor.pin_memory() for name, tensor in stock.items()}
        elif self.width is not None:  # the hooks weight a stock script's losses: not in its step
            _ = local.untrained, local.float_weights
        return packed, local, stock


def _moved(micro_batch: MicroBatch, device: torch.device) -> MicroBatch:
    if device.type == "cpu":
        return micro_batch
    return _changed(micro_batch, lambda tensor: tensor.to(device, non_blocking=True))


def _changed(micro_batch: MicroBatch, change: Callable[[torch.Tensor], Any]) -> MicroBatch:
    """The micro-batch with every tensor changed."""
    values = {field.name: getattr(micro_batch, field.name) for field in fields(micro_batch)}
    tensors = {n: change(v) for n, v in values.items() if isinstance(v, torch.Tensor)}
    columns = {name: change(column) for name, column in micro_batch.columns.items()}
    return replace(micro_batch, **tensors, columns=columns)


def _laid_out(packed: PackedSequence, samples: Mapping[int, Sample], name: str) -> Any:
    """[S, …] of the full sequence."""
    own = [samples[row] for row in packed.sample_rows]
    like = next(
        (a for s in samples.values() for a in (_arrays(s).get(name),) if a is not None), None
    )
    if like is None:
        raise ValueError(
            f"no sample of this rank has an array {name!r}; give it in token_arrays or "
            "response_arrays of each Sample"
        )
    pack = packed.pack
    if not own:
        return np.zeros((pack.num_rows, *like.shape[1:]), like.dtype)
    arrays = [_arrays(sample)[name] for sample in own]
    if name in own[0].token_arrays:
        return pack.tokens.joined(arrays, like.dtype)
    held = zip(arrays, pack.num_unpredicted.tolist(), strict=True)
    return pack.responses.joined([array[first:] for array, first in held], like.dtype)


def _arrays(sample: Sample) -> dict[str, Any]:
    return {**sample.token_arrays, **sample.response_arrays}
