"""Nothing, one of a thing, too much of it, and values that are no numbers."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from megatron_dynbatch.layout import build_micro_batch
from megatron_dynbatch.plan import ParallelLayout, Plan, PlanOptions, make_plan
from megatron_dynbatch.plan.summary import summarize
from megatron_dynbatch.rollouts import RolloutDirectory, Sample, SampleIndex
from megatron_dynbatch.steps.step import Step
from tests.parity.compare import deviations
from tests.parity.job import OWN_SCRIPT, Cell, run_cell
from tests.parity.layouts import Layout
from tests.parity.reference import Recipe, train
from tests.parity.rollouts import CAPACITY, Example, make_steps, write_batches
from tests.pool import RankError
from tests.reliability.catalogue import shown

MILLION = 1_000_000


def example(tokens: tuple[int, ...], mask: tuple[int, ...], rollout: int) -> Example:
    zeros = (0.0,) * len(mask)
    return Example(tokens, mask, rollout, rollout, (1.0,) * len(mask), zeros, zeros)


def test_empty_batches_and_single_tokens_in_a_training(tmp_path: Path) -> None:
    """A batch that trains nothing is passed over; a batch of one trained token is a step."""
    ordinary = make_steps((5,))[0]
    nothing = [example((3, 4, 5), (0, 0), 5), example((6, 7), (0,), 6)]
    one_token = [example((8, 9), (1,), 7)]
    no_response = [example((5,), (), 8), example((5, 6, 7), (1, 0), 9)]
    batches = [nothing, ordinary, nothing, one_token, no_response, nothing]
    write_batches(tmp_path / "rollouts", batches)
    trained = [ordinary, one_token, no_response]
    recipe = Recipe(decay=20, clip_grad=0.0, epsilon=1e-8)
    flags = {
        "dynamic-global-batch": True,
        "rollout-path": tmp_path / "rollouts",
        "rollouts-per-step": "batch",
        "max-tokens-per-gpu": CAPACITY,
        "train-samples": 100,
        **Layout(dp=2).flags(),
    }
    observed = run_cell(Cell(2, flags, recipe, script=OWN_SCRIPT))
    found = deviations(observed, train(trained, recipe))
    assert max(found["metrics"], found["gradients"], found["parameters"]) < 1e-9
    assert found["learning rate"] < 1e-12
    # Rollouts of passed-over batches are consumed before the steps that follow them.
    assert [row["consumed"] for row in observed[-1].rows] == [2 + 5, 9 + 1, 10 + 2]


def test_an_infinite_loss_names_sample_rollout_and_rank(tmp_path: Path) -> None:
    """A token that the reference model forbids is allowed, but its KL penalty is infinite."""
    examples = make_steps((6,))[0]
    directory = RolloutDirectory(tmp_path / "rollouts")
    row = next(n for n, e in enumerate(examples) if e.rollout == 4 and e.mask[-1])
    poisoned = replace(examples[row], ref_log_probs=(-math.inf,) * len(examples[row].mask))
    examples[row] = poisoned
    write_batches(directory.path, [examples])
    index = directory.index(0)
    layout = ParallelLayout(dp=2)
    plan = make_plan(index, layout, PlanOptions(max_tokens_per_gpu=CAPACITY, fixed_width=True))
    rank = next(dp for dp, mbs in enumerate(plan.steps[0].micro_batches) for mb in mbs if row in mb)
    flags = {
        "dynamic-global-batch": True,
        "rollout-path": directory.path,
        "rollouts-per-step": "batch",
        "max-tokens-per-gpu": CAPACITY,
        "train-samples": 6,
        "loss-head": "policy",
        "rerun-mode": "disabled",
    }
    with pytest.raises(RankError) as raised:
        run_cell(Cell(2, flags, Recipe(objective="clip", clip_grad=0.0), script=OWN_SCRIPT))
    first = len(poisoned.tokens) - len(poisoned.mask) + poisoned.mask.index(1)
    for part in (
        f"NonFiniteLossError: rank {rank} (DP rank {rank}): the loss of step 0 is not finite: ",
        f"ref_log_probs is -inf at the prediction of token {first} of row {row} of rollout batch 0 "
        "(rollout 4)",
    ):
        assert part in str(raised.value)
    shown("rank … (DP rank …): the loss of step", str(raised.value))


def lengths_of(count: int, length: int) -> SampleIndex:
    full, absent = np.full(count, length), np.full(count, -1)
    return SampleIndex(full, full - 1, full - 1, absent, absent)


@pytest.mark.parametrize("reduction", ["token", "rollout"])
def test_more_than_2_to_the_31_tokens_in_a_step(reduction: str, tmp_path: Path) -> None:
    count, length = 2200, MILLION
    layout = ParallelLayout(dp=8, cp=8)
    options = PlanOptions(max_tokens_per_gpu=131_072, loss_reduction=reduction)
    plan = make_plan(lengths_of(count, length), layout, options)
    plan.check()
    (step,) = plan.steps
    num_trained = count * (length - 1)
    assert num_trained > 2**31
    assert step.num_trained_tokens == num_trained
    assert step.loss_denominator == (num_trained if reduction == "token" else count)
    assert Plan.from_json(plan.to_json()).fingerprint == plan.fingerprint
    (figures,) = summarize(plan)
    assert figures.num_microbatches == count // 8
    opened = Step(plan, 0, 0, dp_rank=0, cp_rank=0, samples={}, width=None, device="cpu")
    assert opened.num_tokens == count * length


def test_samples_of_a_million_tokens_are_laid_out() -> None:
    lengths = (MILLION, 999_999, 1)
    samples = {
        row: Sample(np.arange(n) % 1000, loss_mask=np.ones(n - 1, np.uint8))
        for row, n in enumerate(lengths)
    }
    layout = ParallelLayout(cp=8)
    index = SampleIndex.from_samples(list(samples.values()))
    plan = make_plan(index, layout, PlanOptions(max_tokens_per_gpu=131_072))
    (step,) = plan.steps
    tokens = weights = 0.0
    for k in range(step.num_microbatches):
        for cp_rank in range(8):
            mb = build_micro_batch(plan, 0, 0, k, samples, cp_rank=cp_rank)
            tokens += int(mb.tokens.sum())
            weights += float(mb.token_weights.sum())
    assert tokens == sum(int(sample.tokens.sum()) for sample in samples.values())
    # Each rollout with a trained token weighs 1; the third has none.
    assert weights == pytest.approx(2, rel=1e-9)
