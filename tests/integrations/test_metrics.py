"""The trainers' aggregation functions on real ranks, against one number for every layout."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.distributed as dist

from megatron_dynbatch.geometry import zigzag_indices
from megatron_dynbatch.integrations.metrics import (
    gather_and_reduce_log_dict,
    gather_log_data,
    reduce_train_step_metrics,
    rollout_log_metric_contribution,
)
from megatron_dynbatch.reduce import get_sum_of_sample_mean
from megatron_dynbatch.report import Metric
from tests.pool import run_ranks

# Four rollouts, one of them of two samples (rows 0 and 3): response lengths, one value each.
PROMPT = 2
RESPONSES = [4, 6, 2, 8, 10]
X = [1.0, 2.0, 4.0, 3.0, 5.0]
ROLLOUTS = [0, 1, 2, 0, 3]
PER_ROLLOUT = ((4 * 1 + 8 * 3) / 12 + 2 + 4 + 5) / 4
PER_TOKEN = float(np.dot(RESPONSES, X)) / sum(RESPONSES)
# [dp][micro-batch] → rows, for one and two data-parallel ranks.
SPLITS = {1: [[[0, 1], [2, 3, 4]]], 2: [[[4], [0]], [[1, 2], [3]]]}


def local_sum(rows: list[int], cp: int, cp_rank: int, per_token: bool) -> torch.Tensor:
    totals, responses = [PROMPT + RESPONSES[i] for i in rows], [RESPONSES[i] for i in rows]
    masks = [torch.ones(n) for n in responses]
    mask_sums = [12 if ROLLOUTS[i] == 0 else RESPONSES[i] for i in rows]
    reduce = get_sum_of_sample_mean(
        totals, responses, masks, mask_sums, per_token, cp_size=cp, cp_rank=cp_rank
    )
    unit = 1 if cp == 1 else 2 * cp
    padded = [-(-t // unit) * unit for t in totals]
    full = np.concatenate([np.full(p, X[i]) for p, i in zip(padded, rows, strict=True)])
    index = zigzag_indices(np.cumsum([0, *padded]), cp, cp_rank)
    return reduce(torch.from_numpy(full[index]))


def train_job(dp: int, cp: int, per_token: bool) -> dict[str, float]:
    dp_rank, cp_rank = divmod(dist.get_rank(), cp)
    reports = []
    for rows in SPLITS[dp][dp_rank]:
        tokens = float(sum(RESPONSES[i] for i in rows))
        total = local_sum(rows, cp, cp_rank, per_token)
        values = torch.stack([torch.tensor(tokens, dtype=torch.float64), total, 2 * total])
        reports.append({"keys": ["loss", "twice"], "values": values})
    return reduce_train_step_metrics(
        reports,
        calculate_per_token_loss=per_token,
        step_global_batch_size=4,
        cp_size=cp,
        dp_with_cp_group=dist.group.WORLD,
    )


def rollout_job(dp: int, cp: int) -> dict[str, float] | None:
    dp_rank, cp_rank = divmod(dist.get_rank(), cp)
    rows = [row for rows in SPLITS[dp][dp_rank] for row in rows]
    contribution = rollout_log_metric_contribution(
        local_sum(rows, cp, cp_rank, False).item(),
        cp_size=cp,
        num_rollouts_in_rollout=4,
        dp_size=dp,
    )
    longest = Metric("max", (float(max(RESPONSES[i] for i in rows)),))
    log = {"x": contribution, "longest": longest, "same everywhere": 7.0}
    return gather_and_reduce_log_dict(log, dp_size=dp * cp, dp_src_rank=0, dp_group=None)


def whole_job(dp: int, cp: int) -> tuple[dict[str, float] | None, ...]:
    return train_job(dp, cp, False), train_job(dp, cp, True), rollout_job(dp, cp)


@pytest.mark.parametrize(("dp", "cp"), [(1, 1), (2, 1), (1, 2), (2, 2)])
def test_training_and_rollout_side_report_one_number(dp: int, cp: int) -> None:
    answers = run_ranks(dp * cp, whole_job, dp, cp)
    for rank, (per_rollout, per_token, rollout) in enumerate(answers):
        for found, expected in ((per_rollout, PER_ROLLOUT), (per_token, PER_TOKEN)):
            assert found == pytest.approx({"loss": expected, "twice": 2 * expected}, rel=1e-14)
        if rank:
            assert rollout is None
        else:
            wanted = {"x": PER_ROLLOUT, "longest": 10.0, "same everywhere": 7.0}
            assert rollout == pytest.approx(wanted)


def lost_job() -> str:
    log = {"reward": 1.0} if dist.get_rank() == 0 else {"reward": 1.0, "turns": (3.0, 1.0)}
    with pytest.raises(ValueError) as caught:
        gather_and_reduce_log_dict(log, dp_size=2, dp_src_rank=0, dp_group=None)
    with pytest.raises(ValueError, match="dp_size is 3 but the group has 2 ranks"):
        gather_and_reduce_log_dict(log, dp_size=3, dp_src_rank=0, dp_group=None)
    return str(caught.value)


def test_a_lost_name_is_an_error_on_both_ranks() -> None:
    expected = "metric 'turns' is reported by rank 1 but not by rank 0; "
    assert all(answer.startswith(expected) for answer in run_ranks(2, lost_job))


def test_typed_reports_and_names_that_change_between_micro_batches() -> None:
    call = dict(
        calculate_per_token_loss=False, step_global_batch_size=1, cp_size=1, dp_with_cp_group=None
    )
    clipped = [{"clip": Metric.mean(1.0, 1.0)}, {"clip": Metric.mean(0.0, 3.0)}]
    assert reduce_train_step_metrics(clipped, **call) == {"clip": 0.25}
    with pytest.raises(ValueError, match="'b' is reported by micro-batch 1 but not by"):
        reduce_train_step_metrics([{}, {"b": Metric.count(1)}], **call)
    with pytest.raises(ValueError, match="on the last pipeline stage"):
        reduce_train_step_metrics([], **call)
    with pytest.raises(ValueError, match="3 values were given for a count and keys"):
        reduce_train_step_metrics([{"keys": ["a"], "values": torch.zeros(3)}], **call)


def test_log_data_is_written_at_the_iteration() -> None:
    written = []
    args = SimpleNamespace(curr_iteration=17)
    log = {"reward": (3.0, 2.0)}
    for _ in range(2):
        found = gather_log_data(
            "rollout", args, 5, log, writers=[lambda values, step: written.append((values, step))]
        )
        assert found == {"rollout/reward": 1.5}
    gather_log_data("eval", args, 5, log, iteration=18, writers=[lambda v, s: written.append(s)])
    assert written == [({"rollout/reward": 1.5}, 17)] * 2 + [18]
