"""Megatron's own schedule under the hooks, with a model of three numbers; sums done by hand.

The model's token losses are p times the token, its router term is q times the tokens that it was
told are no padding, its MTP term is r times the trained tokens that it was told of. So the step's
gradients are sums over samples, whatever the micro-batches:

    p   Σ_i (1 / d_i) · Σ_t m_it · token_it, over B
    q   Σ_k t_k / T · t_k, micro-batch k having t_k of the step's T tokens
    r   Σ_k e_k / E · m_k, with m_k trained tokens, e_k of them at least two behind the first token
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from megatron_dynbatch.errors import OptionError
from megatron_dynbatch.hooks.aux_loss import begin_schedule, watch_backward
from megatron_dynbatch.hooks.loss import _scaled_forward_step, getting_forward_backward
from megatron_dynbatch.hooks.session import Session, current, end_session, start_session
from megatron_dynbatch.hooks.step_boundary import advance_lr
from megatron_dynbatch.plan import make_plan
from megatron_dynbatch.rollouts import Sample, SampleIndex
from megatron_dynbatch.steps import Step
from tests.hooks.helpers import arguments
from tests.pool import run_ranks

# Prompt, mask of the response, rollout; token j of the sample n is 10·n + j.
SHAPES = [
    (3, [1, 1, 0, 1], 0), (2, [1, 1], 0), (1, [1, 0, 1, 1, 1], 1), (4, [1] * 7, 2),
    (0, [0, 1, 1], 3),
]  # fmt: skip
WIDTH = 12
SCALE = 8.0  # of mixed precision


def samples_of(shapes: Sequence[tuple[int, list[int], int]] = SHAPES) -> list[Sample]:
    return [
        Sample(10 * n + np.arange(prompt + len(mask)), loss_mask=mask, rollout_id=rollout)
        for n, (prompt, mask, rollout) in enumerate(shapes)
    ]


def open_step(run: Session, size: int = len(SHAPES), rank: int = 0) -> Step:
    """The first samples as one step."""
    samples = samples_of()[:size]
    plan = make_plan(SampleIndex.from_samples(samples), run.layout, run.options.plan)
    cp = run.layout.cp
    run.step = Step(
        plan, 0, 0, dp_rank=rank // cp, cp_rank=rank % cp, samples=dict(enumerate(samples)),
        width=WIDTH, device="cpu",
    )  # fmt: skip
    return run.step


def summed_gradients(step: Step) -> dict[str, float]:
    """p, q and r of the docstring from the samples; the plan only says which go together."""
    samples = samples_of()[: len(step.samples)]
    trained = {r: sum(s.mask_sum for s in samples if s.rollout_id == r) for r in range(4)}
    p = 0.0
    for sample in samples:
        tokens = sample.tokens[-sample.response_length :]
        # A token's loss stands where the token before it is.
        p += float(((tokens - 1) * sample.loss_mask).sum()) / trained[sample.rollout_id]
    batches = [[samples[row] for row in rows] for rows in step.step_plan.micro_batches[0]]
    lengths = [sum(s.total_length for s in batch) for batch in batches]
    masks = [sum(s.mask_sum for s in batch) for batch in batches]
    second = [sum(behind_two(s) for s in batch) for batch in batches]
    return {
        "p": p / len({s.rollout_id for s in samples}),
        "q": sum(t * t for t in lengths) / sum(lengths),
        "r": sum(m * e for m, e in zip(masks, second, strict=True)) / sum(second),
    }


def behind_two(sample: Sample) -> int:
    """Trained tokens of which the token two before is in the sample too."""
    prompt = sample.total_length - sample.response_length
    return sum(int(m) for j, m in enumerate(sample.loss_mask) if prompt + j >= 2)


class ThreeNumbers(torch.nn.Module):
    """The model of the docstring."""

    def __init__(self, **config: Any) -> None:
        from megatron.core.enums import ModelType
        from megatron.core.transformer import TransformerConfig

        super().__init__()
        self.model_type = ModelType.encoder_or_decoder
        self.config = TransformerConfig(
            num_layers=1, hidden_size=8, num_attention_heads=1, grad_scale_func=lambda x: SCALE * x,
            **config,
        )  # fmt: skip
        for name in "pqr":
            self.register_parameter(name, torch.nn.Parameter(torch.ones((), dtype=torch.float64)))

    def set_input_tensor(self, given: Any) -> None:
        """Of the pipeline stage before: there is none."""

    def forward(
        self,
        tokens: torch.Tensor,
        labels: Any = None,
        loss_mask: Any = None,
        output_processor: Any = None,
        padding_mask: Any = None,
    ) -> torch.Tensor:
        from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler
        from megatron.core.transformer.multi_token_prediction import MTPLossAutoScaler

        losses = self.p * tokens.double()
        if self.config.num_moe_experts:
            seen = tokens.numel() if padding_mask is None else (~padding_mask).sum()
            losses = MoEAuxLossAutoScaler.apply(losses, self.q * seen)
        if self.config.mtp_num_layers:
            counted = tokens.numel() if loss_mask is None else loss_mask.sum()
            losses = MTPLossAutoScaler.apply(losses, self.r * counted)
        return losses

    def gradients(self) -> dict[str, float]:
        """Without the loss scale; they are forgotten."""
        found = {n: p.grad.item() / SCALE for n, p in self.named_parameters() if p.grad is not None}
        self.zero_grad()
        return found


def forward_step(iterator: Any, model: Any) -> tuple[torch.Tensor, Any]:
    def loss_function(output: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        return output.sum(), {"lm loss": output.detach().sum()}

    return model(current().tokens), loss_function


def run_schedule(model: Any, step: Step | None, **more: Any) -> list[Any]:
    from megatron.core.pipeline_parallel import get_forward_backward_func

    return getting_forward_backward(get_forward_backward_func)()(
        forward_step_func=forward_step, data_iterator=None, model=model,
        num_microbatches=1 if step is None else step.num_microbatches, seq_length=WIDTH,
        micro_batch_size=1, **more,
    )  # fmt: skip


def session_for(**changed: Any) -> Session:
    """Its model is admitted, its first batch was looked at."""
    values = {
        "admit_unproven": ["model-class"], "max_tokens_per_gpu": WIDTH,
    }  # fmt: skip
    run = start_session(arguments(**{**values, **changed}))
    run.has_first_batch = True
    return run


def initialize(**sizes: int) -> None:
    from megatron.core import parallel_state

    parallel_state.initialize_model_parallel(**sizes)


def two_steps(aux: dict[str, int], config: dict[str, Any]) -> list[Any]:
    """Gradients and reported losses of a step of all samples and one of three."""
    initialize()
    run, model = session_for(**aux), ThreeNumbers(**config)
    found = []
    for size in (len(SHAPES), 3):
        step = open_step(run, size)
        given = [model] if size == 3 else model  # Megatron hands over a list of chunks
        (report,) = run_schedule(given, step)
        found.append((model.gradients(), report["lm loss"].tolist()))
    return found


def expected_steps(names: str) -> list[Any]:
    run = session_for()
    steps = [summed_gradients(open_step(run, size)) for size in (len(SHAPES), 3)]
    end_session()
    return [({n: pytest.approx(s[n], rel=1e-12) for n in names}, s["p"]) for s in steps]


@pytest.mark.parametrize(
    ("names", "aux", "config"),
    [
        ("p", {}, {}),
        ("pq", {"num_experts": 4}, {"num_moe_experts": 4, "add_bias_linear": False}),
        ("pr", {"mtp_num_layers": 1}, {"mtp_num_layers": 1}),
    ],
    ids=["loss", "experts", "MTP"],
)
def test_gradients_are_the_sums_over_samples(
    names: str, aux: dict[str, int], config: dict[str, Any]
) -> None:
    (found,) = run_ranks(1, two_steps, aux, config)
    for (gradients, report), (expected, loss) in zip(found, expected_steps(names), strict=True):
        assert gradients == expected
        assert report == pytest.approx([loss, 1.0], rel=1e-12)


def expected_values() -> dict[str, float]:
    run = session_for()
    found = summed_gradients(open_step(run))
    end_session()
    return found


def untouched() -> list[Any]:
    """Evaluation inside a step, a training without an open step, and one without a run."""
    initialize()
    run, model = session_for(), ThreeNumbers()
    step = open_step(run)
    run.select(1)
    tokens = int(run.current.tokens.sum())
    seen = [run_schedule(model, step, forward_only=True)[-1]["lm loss"].item() - tokens]
    seen += [run.current_index, run.model_checked]
    run.step = None
    seen.append(run_schedule(model, None)[0]["lm loss"].item() - tokens)
    run.model_checked = True
    current_tokens = run.current.tokens
    end_session()

    def own(iterator: Any, model: Any) -> tuple[torch.Tensor, Any]:
        return model(current_tokens), lambda output: (output.sum(), {"sum": output.sum().item()})

    from megatron.core.pipeline_parallel import get_forward_backward_func

    schedule = getting_forward_backward(get_forward_backward_func)()
    (report,) = schedule(
        forward_step_func=own, data_iterator=None, model=model, num_microbatches=1, seq_length=1,
        micro_batch_size=1,
    )  # fmt: skip
    return [*seen, report["sum"] - tokens]


def test_only_training_passes_of_an_open_step_are_scaled() -> None:
    assert run_ranks(1, untouched) == [[0.0, 1, False, 0.0, 0.0]]


def refusals() -> list[Any]:
    initialize()
    found: list[Any] = []
    model = ThreeNumbers()
    for given in (model, [model]):
        run = session_for(admit_unproven=None)
        with pytest.raises(OptionError) as raised:
            run_schedule(given, open_step(run))
        found.append(str(raised.value).split(":")[0])
    run = session_for()
    run_schedule(model, open_step(run))
    run.options = replace(run.options, admitted=frozenset())
    run_schedule(model, open_step(run))  # it was looked at once
    return found


def test_a_model_is_looked_at_once() -> None:
    assert run_ranks(1, refusals) == [["the model is a ThreeNumbers"] * 2]


def balanced_step() -> list[Any]:
    """A step that is run again: what was counted before is not there; then the update succeeded."""
    initialize()
    aux = {"num_experts": 4, "moe_balance": "previous-step"}
    run, model = session_for(**aux), ThreeNumbers(num_moe_experts=4, add_bias_linear=False)
    run.samples_of_tokens[0] = "of the step before"
    step = open_step(run)
    run_schedule([model], step)
    begun = run.balance is not None and not run.samples_of_tokens
    router: Any = SimpleNamespace(layer_number=1, is_mtp_layer=False, config=model.config)
    run.balance.count(router, torch.ones(1, 4, dtype=torch.bool))
    run_schedule([model], step)
    size = advance_lr(40, {})
    return [begun, size, run.args.dynbatch_balance]


def test_expert_counts_begin_with_the_step_and_are_kept_after_its_update() -> None:
    tokens = sum(prompt + len(mask) for prompt, mask, _ in SHAPES)
    counts = {"tokens": tokens, "counts": [[0, 0, 0, 0]]}
    assert run_ranks(1, balanced_step) == [[True, 4, counts]]


def mtp_tokens() -> int:
    """As two ranks that share every sequence agree on it."""
    initialize(context_parallel_size=2)
    run = session_for(mtp_num_layers=1, context_parallel_size=2, max_tokens_per_gpu=WIDTH // 2)
    open_step(run, rank=torch.distributed.get_rank())
    begin_schedule(run, [ThreeNumbers(mtp_num_layers=1)])
    return run.mtp_tokens


def test_ranks_agree_on_the_tokens_that_mtp_is_trained_on() -> None:
    expected = sum(map(behind_two, samples_of()))
    assert run_ranks(2, mtp_tokens) == [expected, expected]


@pytest.fixture
def run() -> Any:
    """A session of this process, without auxiliary losses."""
    yield session_for()
    end_session()


def test_backward_selects_the_micro_batch_of_its_own_output(run: Session) -> None:
    open_step(run)
    outputs = [torch.ones((), requires_grad=True) * 2 for _ in range(2)]
    for k, output in enumerate(outputs):
        run.select(k)
        watch_backward(run, k, output)
    for k in (0, 1, 0):
        outputs[k].backward(retain_graph=True)
        assert run.current_index == k and run.current is run.step.micro_batch(k)


def test_an_output_without_gradient_is_let_alone(run: Session) -> None:
    open_step(run)
    watch_backward(run, 0, torch.ones(1))
    watch_backward(run, 0, ["of", "several", "tensors"])


def test_a_stage_before_the_last_has_no_loss_to_scale(run: Session) -> None:
    open_step(run)
    scaled = _scaled_forward_step(run, lambda iterator, model: ("hidden states", None))
    assert scaled(None, object()) == ("hidden states", None)
    assert run.current_index == 0
    assert scaled(None, object()) == ("hidden states", None)
