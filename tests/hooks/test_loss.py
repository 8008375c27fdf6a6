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
from megatron_dynbatch.report import Metric
from megatron_dynbatch.rollouts import Sample, SampleIndex
from tests.golden import MASKS, PROMPTS, ROLLOUTS, VALUES
from tests.hooks.helpers import training_options
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
        options=training_options(calculate_per_token_loss=per_token),
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


def test_the_local_sum_is_kept_until_it_is_known_to_be_finite() -> None:
    micro_batch, x = golden()
    of_run = run()
    x = x.nan_to_num().requires_grad_()
    _scaled_loss(of_run, micro_batch, lambda output: (output.sum(), {}), x)
    ((kept_of, kept),) = of_run.loss_sums
    # B = 3 rollouts of mean 4 + 5/2, 0 and 5, and M = W = 1.
    assert kept_of is micro_batch and kept.item() == pytest.approx(9.0) and not kept.requires_grad
    summed = micro_batch.summed["loss"]
    assert torch.equal(summed, x) and not summed.requires_grad


@pytest.mark.parametrize("shape", [(1, 20), (20,), (20, 1)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_token_losses_keep_shape_and_type(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    micro_batch, x = golden("sample")
    weighted = weighted_output(x.to(dtype).reshape(shape), micro_batch)
    assert weighted.shape == shape and weighted.dtype == dtype
    # 6/3 + 10 + 10/2 over the samples; C has no trained token.
    assert weighted.double().sum().item() == pytest.approx(17.0, rel=1e-2)
    if dtype == torch.float64:
        assert weighted.sum().item() == pytest.approx(17.0, rel=1e-15)


def test_reports_hold_values_and_no_graph() -> None:
    micro_batch, x = golden()
    x = x.nan_to_num().requires_grad_()

    def loss_function(output: torch.Tensor) -> tuple[Any, ...]:
        total = output.sum()
        own = Metric.total(7.0)
        pair = torch.stack([2 * total, torch.ones(())])
        return total, {"sum": total, "pair": pair, "number": 4.5, "own": own}

    _, _, report = _scaled_loss(run(), micro_batch, loss_function, x)
    assert {name: metric.value() for name, metric in report.items()} == pytest.approx(
        {"sum": 3.0, "pair": 6.0, "number": 1.5, "own": 7.0}
    )
    kept = [part for metric in report.values() for part in metric.parts]
    assert not any(torch.as_tensor(part).requires_grad for part in kept)


def test_keywords_that_a_script_binds_itself_are_its_own() -> None:
    micro_batch, x = golden()
    seen: list[Any] = []

    def own_loss(output: torch.Tensor, *, microbatch: Any, sample_denoms: Any) -> tuple[Any, ...]:
        seen.append((microbatch, sample_denoms))
        return output.nansum(), {}

    inner = functools.partial(own_loss, microbatch="mine")
    _scaled_loss(run(), micro_batch, functools.partial(inner, sample_denoms="too"), x)
    _scaled_loss(run(), micro_batch, inner, x)
    assert seen[0] == ("mine", "too")
    assert seen[1][0] == "mine" and seen[1][1] is micro_batch.sample_denoms


@pytest.mark.parametrize(
    ("returned", "named"),
    [(torch.ones(1, 20), r"a tensor of shape \(1, 20\)"), (3.0, "a float"), (None, "a NoneType")],
)
def test_what_a_loss_returns_instead_of_a_scalar_is_named(returned: Any, named: str) -> None:
    micro_batch, x = golden()
    with pytest.raises(ValueError, match=f"not {named}$"):
        _scaled_loss(run(), micro_batch, lambda output: (returned, {}), x)
