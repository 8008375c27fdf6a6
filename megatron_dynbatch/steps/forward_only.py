"""Forward-only passes over the rollouts of a batch: old or reference log-probs, values.

They need no activations for a backward pass, so they pack more tokens into a micro-batch than
training does. Samples stay on the data-parallel rank that trains them: results need no exchange.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_dynbatch.layout import MicroBatch
from megatron_dynbatch.plan import Plan, PlanError, PlanOptions, padded_length
from megatron_dynbatch.plan.packing.decreasing import best_fit_decreasing
from megatron_dynbatch.plan.packing.splitting import expand_bins_by_splitting
from megatron_dynbatch.plan.step_plan import make_step
from megatron_dynbatch.rollouts import Sample
from megatron_dynbatch.steps.loaded_batch import LoadedBatch
from megatron_dynbatch.steps.step import Step
from megatron_dynbatch.wording import counted

type PerToken = Callable[[Tensor], Tensor]
ForwardStep = Callable[[MicroBatch, Any], tuple[Tensor, PerToken]]


def plan_forward_pass(plan: Plan, max_tokens_per_gpu: int, first_step: int = 0) -> Plan:
    """One pass over the samples of a plan's steps, each on the rank that trains it.

    Args:
        plan: Of the batch.
        max_tokens_per_gpu: Cap of the pass; a sample over it is alone in a micro-batch.
        first_step: Steps before it are left out.

    Returns:
        A plan with one step. All ranks run the same number of micro-batches, one that Megatron's
        schedule accepts; they are split rather than filled up with dummies. It is no plan to train
        by (`check` is for those): d of a sample is that of its training step, B is the pass's own.

    Raises:
        PlanError: No step is left, or the cap is less than one laid-out row.
    """
    steps = plan.steps[first_step:]
    if not steps:
        held = counted(len(plan.steps), "step")
        raise PlanError(f"forward-only pass: the batch has {held}, none is left")
    options = replace(
        plan.options, max_tokens_per_gpu=max_tokens_per_gpu, micro_batch_size=None,
        fixed_width=False, max_logits_per_gpu=None, vocab_size=None,
    )  # fmt: skip
    lengths = padded_length(plan.index.total_lengths, plan.layout)
    capacity = _capacity(options, plan)
    rows = [
        sorted(row for step in steps for rows in step.micro_batches[rank] for row in rows)
        for rank in range(plan.layout.dp)
    ]
    packed = [best_fit_decreasing(lengths[own], capacity) for own in rows]
    count = plan.layout.next_admissible(max(len(bins) for bins in packed))
    micro_batches = []
    for own, bins in zip(rows, packed, strict=True):
        bins = expand_bins_by_splitting(bins, count, lengths[own].tolist())
        dummies = [()] * (count - len(bins))
        micro_batches.append((*(tuple(own[i] for i in items) for items in bins), *dummies))
    num_rollouts = sum(step.step_global_batch_size for step in steps)
    step = make_step(micro_batches, num_rollouts, plan.index, plan.options)
    return replace(plan, options=options, steps=(step,))


def run_forward_only(
    batch: LoadedBatch,
    model: Sequence[Any],
    forward_step: ForwardStep,
    schedule: Callable[..., Any],
    *,
    max_tokens_per_gpu: int,
    dp_rank: int = 0,
    cp_rank: int = 0,
    cp_group: dist.ProcessGroup | None = None,
    device: torch.device | str = "cpu",
) -> dict[int, Tensor]:
    """Runs the model forward over this rank's samples of a batch.

    Every rank must call it, from `StepFeed.on_batch_opened` for example. The model's mode (dropout)
    is the caller's.

    Args:
        batch: As this rank has it.
        model: Model chunks of this rank, as Megatron's training loop has them.
        forward_step: `(micro_batch, chunk)` → what the chunk returned, and a function of it that
            gives one value per local token, [T_local] or [1, T_local]; it is called on the last
            pipeline stage. It is also called for dummies, whose values are forgotten.
        schedule: `megatron.core.pipeline_parallel.get_forward_backward_func()`.
        max_tokens_per_gpu: Cap of the pass.
        dp_rank: Data-parallel rank, without context parallelism.
        cp_rank: Context-parallel rank.
        cp_group: Context-parallel group, if there is more than one such rank.
        device: Where micro-batches go.

    Returns:
        Plan row → values of its response [R], on the host, in row order; on the last pipeline
        stage only, elsewhere nothing.

    Raises:
        PlanError: No sample is left to run, or the cap is less than one laid-out row.
        ValueError: `forward_step` gives another number of values than there are local tokens.
    """
    if batch.plan is None:
        raise PlanError(f"rollout batch {batch.batch_id} has nothing to run forward")
    plan = plan_forward_pass(batch.plan, max_tokens_per_gpu, batch.first_step)
    step = Step(
        plan, 0, batch.batch_id, dp_rank=dp_rank, cp_rank=cp_rank, samples=batch.samples,
        width=None, device=device,
    )  # fmt: skip
    values: dict[int, Tensor] = {}

    def forward(numbers: Iterator[int], chunk: Any) -> tuple[Tensor, Any]:
        k = next(numbers)
        micro_batch = step.micro_batch(k)
        output, per_token = forward_step(micro_batch, chunk)

        def collect(output: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
            values[k] = _checked(per_token(output), micro_batch)
            return output.new_zeros(()), {}

        return output, collect

    # Each chunk of an interleaved schedule runs all micro-batches by an iterator of its own.
    iterators = [iter(range(step.num_microbatches)) for _ in model]
    with torch.no_grad():
        schedule(
            forward_step_func=forward,
            data_iterator=iterators if len(model) > 1 else iterators[0],
            model=list(model) if len(model) > 1 else model[0],
            num_microbatches=step.num_microbatches,
            seq_length=1,  # lengths are exchanged with each message
            micro_batch_size=1,
            forward_only=True,
        )
    results: dict[int, Tensor] = {}
    for k, local in values.items():
        results |= _by_sample(step.micro_batch(k), local, cp_group)
    return dict(sorted(results.items()))


def with_fields(samples: Mapping[int, Sample], **fields: Mapping[int, Tensor]) -> dict[int, Sample]:
    """The samples with per-token fields from a pass: `with_fields(samples, log_probs=results)`.

    Samples without a result (on the other pipeline stages all) stay as they are.
    """
    completed: dict[int, Sample] = {}
    for row, sample in samples.items():
        new: dict[str, Any] = {n: of[row].float().numpy() for n, of in fields.items() if row in of}
        completed[row] = replace(sample, **new)
    return completed


def _capacity(options: PlanOptions, plan: Plan) -> int:
    capacity = options.capacity(plan.layout)
    assert capacity is not None, "the pass has a token cap"
    return capacity


def _checked(values: Tensor, micro_batch: MicroBatch) -> Tensor:
    if values.numel() != micro_batch.num_tokens:
        raise ValueError(
            f"forward-only pass: {values.numel()} values (shape {list(values.shape)}) for "
            f"{micro_batch.num_tokens} local tokens; return one per token"
        )
    return values.detach().reshape(-1)


def _by_sample(
    micro_batch: MicroBatch, values: Tensor, cp_group: dist.ProcessGroup | None
) -> dict[int, Tensor]:
    """Row → values of its whole response, from the parts of all context-parallel ranks."""
    if micro_batch.is_dummy:
        return {}
    segments = micro_batch.segments
    positions = torch.from_numpy(segments.positions).to(values.device)
    sources = torch.from_numpy(segments.sources[segments.positions]).to(values.device)
    # A first token without a prompt is predicted nowhere: 0.
    flat = torch.zeros(segments.num_mask_entries, dtype=values.dtype, device=values.device)
    flat[sources] = values[positions]
    if micro_batch.cp_size > 1:
        dist.all_reduce(flat, group=cp_group)
    lengths = micro_batch.response_lengths.tolist()
    return dict(zip(micro_batch.sample_rows, flat.cpu().split(lengths), strict=True))
