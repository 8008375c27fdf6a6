"""The aggregation functions of RL trainers under the names that they know, on typed metrics.

Each numerator and denominator is summed before the one division, so no result depends on the
number of micro-batches, on context parallelism, or on how many samples a rank happens to hold.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from megatron_dynbatch.report.metric import (
    Metric,
    check_agreement,
    finished,
    meet,
    merge,
    parts_of,
)
from megatron_dynbatch.report.over_ranks import reduce_over_ranks

LogValue = Metric | tuple[float, float] | float


def reduce_train_step_metrics(
    losses_reduced: Sequence[Mapping[str, Any]],
    *,
    calculate_per_token_loss: bool,
    step_global_batch_size: int,
    cp_size: int,
    dp_with_cp_group: dist.ProcessGroup | None,
) -> dict[str, float]:
    """A step's training metrics from what the loss function reported of each micro-batch.

    Args:
        losses_reduced: Per micro-batch either name → `Metric`, or the trainers' form
            {"keys": K names, "values": [1 + K]}: a token count, then local sums. The count is that
            of whole samples, on every context-parallel rank again.
        calculate_per_token_loss: Sums are divided by the tokens of the step instead of by G.
        step_global_batch_size: G, rollouts of the step.
        cp_size: Context-parallel size C.
        dp_with_cp_group: Data-parallel group with context parallelism.

    Returns:
        Name → value, the same on every rank of the group.

    Raises:
        ValueError: No micro-batch, or names that differ between micro-batches or ranks.
    """
    if not losses_reduced:
        raise ValueError("no micro-batch reported anything; call this on the last pipeline stage")
    if "keys" not in losses_reduced[0]:
        return reduce_over_ranks(merge(losses_reduced, "micro-batch"), dp_with_cp_group)
    contributions = []
    for micro_batch in losses_reduced:
        keys, values = micro_batch["keys"], micro_batch["values"]
        if len(keys) + 1 != values.numel():
            raise ValueError(f"{values.numel()} values were given for a count and keys {keys}")
        # Each rank counted its samples whole, so the sum over context parallelism has C times N.
        count = values[0] / cp_size if calculate_per_token_loss else 0.0
        contributions.append(
            {key: Metric.mean(value, count) for key, value in zip(keys, values[1:], strict=True)}
        )
    merged = merge(contributions, "micro-batch")
    if calculate_per_token_loss:
        return reduce_over_ranks(merged, dp_with_cp_group)
    sums = {key: Metric.total(metric.parts[0]) for key, metric in merged.items()}
    totals = reduce_over_ranks(sums, dp_with_cp_group)
    return {key: total / step_global_batch_size for key, total in totals.items()}


def rollout_log_metric_contribution(
    per_rank_reducer_sum: float, *, cp_size: int, num_rollouts_in_rollout: int, dp_size: int
) -> tuple[float, float]:
    """One rank's (sum, count) of a mean per rollout, for `gather_and_reduce_log_dict`.

    Args:
        per_rank_reducer_sum: Σ w·x of this rank's part, as `get_sum_of_sample_mean` gives it.
        cp_size: Context-parallel size C.
        num_rollouts_in_rollout: Rollouts of the batch, over all ranks.
        dp_size: Data-parallel size without context parallelism.

    Returns:
        (C·sum, rollouts / dp): over DP×CP ranks they add up to C times what is wanted, both.
    """
    return cp_size * per_rank_reducer_sum, num_rollouts_in_rollout / dp_size


def gather_and_reduce_log_dict(
    log_dict: Mapping[str, LogValue],
    *,
    dp_size: int,
    dp_src_rank: int,
    dp_group: dist.ProcessGroup | None,
) -> dict[str, float] | None:
    """Reduces each rank's log values on one rank.

    Args:
        log_dict: Name → `Metric`, (sum, count) for Σ sum / Σ count, or a plain number, which must
            be the same thing on every rank, for the mean over ranks.
        dp_size: Ranks of the group.
        dp_src_rank: Global rank that gets the result.
        dp_group: The group; object collectives must work on it.

    Returns:
        Name → value on `dp_src_rank`, None elsewhere.

    Raises:
        ValueError: On every rank: a name that some ranks lack, naming it and them, or a group of
            another size.
    """
    own = {name: _as_metric(value) for name, value in log_dict.items()}
    sent = {name: (m.kind, parts_of(m).tolist()) for name, m in own.items()}
    if not dist.is_initialized():
        return {name: metric.value() for name, metric in own.items()}
    if dist.get_world_size(dp_group) != dp_size:
        raise ValueError(
            f"dp_size is {dp_size} but the group has {dist.get_world_size(dp_group)} ranks"
        )
    everyone: list[Any] = [None] * dp_size
    dist.all_gather_object(everyone, sent, group=dp_group)
    check_agreement([{name: kind for name, (kind, _) in one.items()} for one in everyone], "rank")
    if dist.get_rank() != dp_src_rank:
        return None
    reduced = {}
    for name, (kind, _) in sent.items():
        rows = torch.tensor([one[name][1] for one in everyone], dtype=torch.float64)
        reduced[name] = finished(kind, meet(kind, rows).tolist())
    return reduced


def gather_log_data(
    metric_name: str,
    args: Any,
    rollout_id: int,
    log_dict: Mapping[str, LogValue],
    *,
    dp_size: int = 1,
    dp_src_rank: int = 0,
    dp_group: dist.ProcessGroup | None = None,
    iteration: int | None = None,
    writers: Sequence[Callable[[Mapping[str, float], int], None]] = (),
) -> dict[str, float] | None:
    """`gather_and_reduce_log_dict` under a prefix, printed and written by one rank.

    Args:
        metric_name: Prefix: "rollout" makes "rollout/reward" of "reward".
        args: Megatron's arguments; `curr_iteration` is the step axis unless one is given.
        rollout_id: Named in the printed line; never a step axis.
        log_dict: As for `gather_and_reduce_log_dict`, and so for the group arguments.
        iteration: Optimizer iteration, the step axis of every log.
        writers: Called with the values and the iteration on `dp_src_rank`.

    Returns:
        Prefixed name → value on `dp_src_rank`, None elsewhere.
    """
    reduced = gather_and_reduce_log_dict(
        log_dict, dp_size=dp_size, dp_src_rank=dp_src_rank, dp_group=dp_group
    )
    if reduced is None:
        return None
    step = getattr(args, "curr_iteration", 0) if iteration is None else iteration
    values = {f"{metric_name}/{name}": value for name, value in reduced.items()}
    print(f"{metric_name} {rollout_id}: {values}", flush=True)
    for write in writers:
        write(values, step)
    return values


def _as_metric(value: LogValue) -> Metric:
    if isinstance(value, Metric):
        return value
    if isinstance(value, tuple):
        return Metric.mean(*value)
    return Metric.mean(value, 1.0)
