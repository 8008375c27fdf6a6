"""What the loss hook hands to Megatron, on the golden micro-batch of one process."""

from __future__ import annotations

import functools
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from megatron_dynbatch.hooks.loss import _scaled_loss, weighted_output
from megatron_dynbatch.layout import MicroBatch, build_micro_batch
from megatron_dynbatch.plan import ParallelLayout, PlanOptions, make_plan
from megatron_dynbatch.rollouts import Sample, SampleIndex
from tests.golden import MASKS, PROMPTS, ROLLOUTS, VALUES
from tests.reliability.catalogue import shown


def golden(reduction: str = "rollout") -> tuple[MicroBatch, torch.Tensor]:
    """The whole fixture as one micro-batch, and x at its positions [1, T]."""
    samples = [
        Sample(np.ones(p + len(m), np.int64), loss_mask=m, rollout_id=r)
        for p, m, r in zip(PROMPTS, MASKS, ROLLOUTS, strict=True)
    ]
    index = SampleIndex.from_samples(samples)
    options = PlanOptions(max_tokens_per_gpu=64, loss_reduction=reduction)
    plan = make_plan(index, ParallelLayout(), options)
    micro_batch = build_micro_batch(plan, 0, 0, 0, dict(enumerate(samples)))
    x = torch.full((1, micro_batch.num_tokens), float("nan"), dtype=torch.float64)
    starts = micro_batch.cu_seqlens_padded.tolist()
    for place, row in enumerate(micro_batch.sample_rows):
        first = starts[place] + PROMPTS[row] - 1
        x[0, first : first + len(VALUES[row])] = torch.tensor(VALUES[row], dtype=torch.float64)
    return micro_batch, x


def run(per_token: bool = False) -> Any:
    return SimpleNamespace(
        layout=ParallelLayout(),
        args=SimpleNamespace(calculate_per_token_loss=per_token),
        loss_sums=[],
    )


def stock_loss(loss_mask: torch.Tensor, output: torch.Tensor) -> tuple[Any, ...]:
    loss = torch.sum(output.view(-1) * loss_mask.view(-1).to(output.dtype))
    num_tokens = loss_mask.sum().to(torch.int)
    return loss, num_tokens, {"lm loss": torch.stack([loss.detach(), num_tokens.double()])}


@pytest.mark.parametrize("reduction, expected", [("rollout", 3.0), ("sample", 4.25),
                                                 ("token", 26 / 6)])
@pytest.mark.parametrize("per_token", [False, True])
def test_a_stock_sum_loss_gives_the_golden_values(
    reduction: str, expected: float, per_token: bool
) -> None:
    micro_batch, x = golden(reduction)
    loss_function = functools.partial(stock_loss, micro_batch.loss_mask)
    loss, count, report = _scaled_loss(run(per_token), micro_batch, loss_function, x)
    assert loss.item() == pytest.approx(expected, rel=1e-12)  # M = W = 1
    assert (count.item(), count.dtype, count.dim()) == (0 if per_token else 1, torch.int32, 0)
    assert report["lm loss"].kind == "mean"
    assert report["lm loss"].value() == pytest.approx(expected, rel=1e-12)


def test_a_loss_with_keywords_gets_the_untouched_output() -> None:
    micro_batch, x = golden()
    seen: dict[str, Any] = {}

    def own_loss(output: torch.Tensor, *, microbatch: MicroBatch, sample_denoms: Any,
                 step_global_batch_size: int) -> tuple[Any, ...]:
        seen.update(denoms=sorted(sample_denoms.tolist()), size=step_global_batch_size)
        assert output is x
        value = microbatch.mean(output)
        return value, {"lm loss": value, "twice": 2 * value}

    loss, _, report = _scaled_loss(run(), micro_batch, own_loss, x)
    assert loss.item() == pytest.approx(3.0)
    assert seen == {"denoms": [0, 2, 4, 4], "size": 3}
    assert [metric.value() for metric in report.values()] == pytest.approx([3.0, 6.0])


def test_nan_at_masked_positions_reaches_no_gradient() -> None:
    micro_batch, x = golden()
    x.requires_grad_()
    weighted_output(x, micro_batch).sum().backward()
    assert x.grad is not None
    assert torch.equal(x.grad.view(-1), micro_batch.token_weights)


def test_an_output_that_is_not_per_token_is_named_by_its_shape() -> None:
    micro_batch, x = golden()
    with pytest.raises(ValueError, match=r"shape \(1, 20, 7\).*20 local tokens"):
        weighted_output(torch.zeros(1, x.numel(), 7), micro_batch)


def test_a_loss_that_returns_no_scalar_is_named() -> None:
    micro_batch, x = golden()
    with pytest.raises(ValueError, match=r"not a tensor of shape \(1, 20\)") as raised:
        _scaled_loss(run(), micro_batch, lambda output: (output, {}), x)
    shown("the loss function must return one scalar", str(raised.value))


def test_a_sum_of_shape_one_is_handed_on_as_a_scalar() -> None:
    micro_batch, x = golden()
    loss, _, _ = _scaled_loss(run(), micro_batch, lambda output: (output.sum()[None], {}), x)
    assert loss.dim() == 0 and loss.item() == pytest.approx(3.0)
