"""The arithmetic of a batch once more, in plain Python loops; shares no code with the package."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from megatron_dynbatch.plan import Plan, PlanOptions
from megatron_dynbatch.rollouts import Sample, SampleIndex


def units(index: SampleIndex, kind: str) -> list[object]:
    """The rollout (or prompt group) of each sample, as any hashable."""
    rollouts: list[object] = [
        ("rollout", int(r)) if r >= 0 else ("alone", row) for row, r in enumerate(index.rollout_ids)
    ]
    if kind == "rollout":
        return rollouts
    return [
        ("group", int(g)) if g >= 0 else rollout
        for g, rollout in zip(index.group_ids, rollouts, strict=True)
    ]


def denominators(
    index: SampleIndex, rows: Sequence[int], options: PlanOptions
) -> tuple[dict[int, float], int]:
    """d of each of these samples, and B of a step that holds them."""
    reduction = options.loss_reduction
    masks = {row: int(index.mask_sums[row]) for row in rows}
    if reduction == "token":
        return dict.fromkeys(rows, 1.0), sum(masks.values())
    if reduction == "sample":
        d = {row: float(masks[row]) for row in rows}
        counts = list(masks.values())
    else:
        unit = units(index, "group" if reduction == "group" else "rollout")
        sums: dict[object, int] = {}
        for row in rows:
            sums[unit[row]] = sums.get(unit[row], 0) + masks[row]
        d = {row: float(sums[unit[row]]) for row in rows}
        counts = list(sums.values())
    if reduction == "constant":
        assert options.loss_constant is not None
        d = dict.fromkeys(rows, options.loss_constant)
    if options.empty_rollouts == "skip":
        counts = [count for count in counts if count]
    return d, len(counts)


def check_plan(plan: Plan) -> None:
    """Every sample once, rollouts whole, caps kept, equal counts, G, B, N and d as defined."""
    index, options, layout = plan.index, plan.options, plan.layout
    seen = [*plan.carried, *plan.dropped]
    rollouts = units(index, "rollout")
    step_of: dict[object, int] = {}
    multiple = 2 * layout.cp if layout.cp > 1 else 1
    for number, step in enumerate(plan.steps):
        rows = [row for rank in step.micro_batches for mb in rank for row in mb]
        seen += rows
        for row in rows:
            assert step_of.setdefault(rollouts[row], number) == number
        assert len(step.micro_batches) == layout.dp
        assert {len(rank) for rank in step.micro_batches} == {step.num_microbatches}
        assert step.step_global_batch_size == len({rollouts[row] for row in rows})
        if options.rollouts_per_step is not None:
            assert step.step_global_batch_size <= options.rollouts_per_step
        d, denominator = denominators(index, rows, options)
        assert step.loss_denominator == denominator
        assert step.num_trained_tokens == sum(int(index.mask_sums[row]) for row in rows)
        assert all(plan.sample_denoms[row] == d[row] for row in rows)
        assert options.max_tokens_per_gpu is not None
        cap = options.max_tokens_per_gpu * layout.cp
        for rank in step.micro_batches:
            for micro_batch in rank:
                lengths = [int(index.total_lengths[row]) for row in micro_batch]
                laid_out = sum(math.ceil(n / multiple) * multiple for n in lengths)
                assert laid_out <= cap or (len(lengths) == 1 and options.oversize == "alone")
    assert sorted(seen) == list(range(len(index)))


def loss(samples: Sequence[Sample], rows: Sequence[int], options: PlanOptions) -> float | None:
    """L of a step over the samples' `values`; None where nothing is trained."""
    index = SampleIndex.from_samples(samples)
    d, denominator = denominators(index, rows, options)
    total = 0.0
    for row in rows:
        sample = samples[row]
        assert sample.values is not None
        for mask, value in zip(sample.loss_mask, sample.values, strict=True):
            if mask:
                total += float(value) / d[row]
    return total / denominator if any(samples[row].mask_sum for row in rows) else None


def local_tokens(tokens: Sequence[np.ndarray], cp_size: int, cp_rank: int) -> list[int]:
    """Samples one after the other, each padded and cut in Megatron's zigzag."""
    own: list[int] = []
    for sample in tokens:
        if cp_size == 1:
            own += sample.tolist()
            continue
        padded = sample.tolist() + [0] * (-len(sample) % (2 * cp_size))
        size = len(padded) // (2 * cp_size)
        for chunk in (cp_rank, 2 * cp_size - 1 - cp_rank):
            own += padded[chunk * size : (chunk + 1) * size]
    return own
