"""Experts, auxiliary losses and MTP against the independent loop, in float64, layout by layout.

The loop sees the micro-batches of the run only for the load-balancing loss, which is defined per
micro-batch; every other term is a mean over the step's tokens. Megatron rounds scores and cross
entropy to float32; that is undone (`float64`) to compare the rest exactly, and left for the last
cells.
"""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.deviation import between_tensors, largest, relative
from tests.parity.architecture import Architecture
from tests.parity.compare import deviations, tensor_deviation
from tests.parity.float64 import keep_float64
from tests.parity.job import NOTES, OWN_SCRIPT, Cell, Observed, assemble, run_cell
from tests.parity.layouts import Layout
from tests.parity.reference import Recipe, ReferenceStep, train
from tests.parity.reference_aux import Auxiliary, Partition
from tests.parity.rollouts import SHORT_SIZES, batch_flags, make_steps, write_batches
from tests.parity.test_layouts import Record, full

slow = pytest.mark.slow

EXPERTS = Architecture(experts=4)
KINDS: dict[str, tuple[Architecture, Auxiliary]] = {
    "z-loss": (EXPERTS, Auxiliary(z_loss=0.1)),
    "load balancing": (EXPERTS, Auxiliary(balance=1.0)),
    "balance of the previous step": (
        EXPERTS, Auxiliary(balance=1.0, balance_over="previous-step")
    ),
    "balance of the same step": (EXPERTS, Auxiliary(balance=1.0, balance_over="same-step")),
    "balance of each sample": (EXPERTS, Auxiliary(sample_balance=1.0)),
    "expert bias": (
        dataclasses.replace(EXPERTS, router_score="sigmoid"),
        Auxiliary(z_loss=0.1, bias_rate=0.05),
    ),
    "MTP": (Architecture(mtp=True), Auxiliary(mtp=0.5)),
    "MTP beside logits": (Architecture(mtp=True), Auxiliary(mtp=0.5)),
}
ONE, DP2, EP2, PP2 = Layout(), Layout(dp=2), Layout(dp=2, ep=2), Layout(pp=2)
VPP2, CP2, EP2_PP2 = Layout(pp=2, vpp=2), Layout(cp=2), Layout(dp=2, ep=2, pp=2)
TP2 = Layout(tp=2, sequence_parallel=True)

type Choice = tuple[str, Layout, bool]
"""Kind, layout, per-token loss."""

FAST: tuple[Choice, ...] = (
    ("z-loss", EP2, False),
    ("z-loss", VPP2, False),
    ("load balancing", EP2_PP2, False),
    ("load balancing", CP2, True),
    ("balance of the previous step", EP2, False),
    ("balance of the same step", EP2_PP2, False),
    ("balance of each sample", CP2, True),
    ("balance of each sample", EP2, False),
    ("expert bias", EP2, False),
    ("MTP", VPP2, False),
    ("MTP", CP2, False),
    ("MTP beside logits", DP2, False),
    ("MTP beside logits", CP2, False),
)
REST: tuple[Choice, ...] = tuple(
    choice
    for kind in KINDS
    for layout in (ONE, DP2, EP2, PP2, VPP2, CP2, TP2, EP2_PP2)
    for per_token in (False, True)
    if (choice := (kind, layout, per_token)) not in FAST
    and not (kind.startswith("MTP") and (per_token or layout.ep > 1))
    and not (per_token and layout in (ONE, PP2, EP2_PP2))
)


def name_of(choice: Choice) -> str:
    kind, layout, per_token = choice
    return f"{kind}, {layout.name}" + (", per-token loss" if per_token else "")


def note_partitions() -> None:
    """Have rank 0 tell which rows are in which micro-batch."""
    from megatron_dynbatch.steps import announce

    make_plan = announce.make_plan

    @functools.wraps(make_plan)
    def make_and_note(*positional: Any, **named: Any) -> Any:
        plan = make_plan(*positional, **named)
        for step in plan.steps:
            NOTES.append([rows for rank in step.micro_batches for rows in rank])
        return plan

    announce.make_plan = make_and_note


def note_and_keep_float64() -> None:
    note_partitions()
    keep_float64()


def recipe_of(kind: str, epsilon: float = 1e-8) -> Recipe:
    return Recipe(
        decay=sum(SHORT_SIZES), clip_grad=0.0, epsilon=epsilon, auxiliary=KINDS[kind][1]
    )


def expected(kind: str, recipe: Recipe, observed: Sequence[Observed]) -> list[ReferenceStep]:
    """The independent loop; it sees micro-batches only where they are part of the definition."""
    partitions: list[Partition] | None = observed[0].notes if kind == "load balancing" else None
    return train(make_steps(SHORT_SIZES), recipe, KINDS[kind][0], partitions=partitions)


def run(
    choice: Choice, path: Path, recipe: Recipe, prepare: Callable[[], None]
) -> list[Observed]:
    kind, layout, per_token = choice
    flags = {
        **batch_flags(path, SHORT_SIZES),
        **layout.flags(),
        "micro-batch-width": "variable",
        "calculate-per-token-loss": per_token,
        "loss-head": "stock" if kind == "MTP" else "logits",
    }
    return run_cell(
        Cell(
            layout.ranks,
            flags,
            recipe,
            KINDS[kind][0],
            script=OWN_SCRIPT,
            prepare=prepare,
        )
    )


def logged_deviation(observed: Sequence[Observed], reference: Sequence[ReferenceStep]) -> float:
    """Of the auxiliary losses in Megatron's log lines."""
    worst = 0.0
    for name in reference[0].logged:
        number = re.compile(rf"{re.escape(name)}: (\S+)")
        lines = [found for line in observed[-1].lines if (found := number.search(line))]
        assert len(lines) == len(reference), f"{name} was logged {len(lines)} times"
        values = [step.logged[name] for step in reference]
        # Megatron's second line shows the mean of the first two iterations.
        values[1] = (values[0] + values[1]) / 2
        off = [relative(float(line[1]), b) for line, b in zip(lines, values, strict=True)]
        worst = largest([worst, *off])
    return worst


def bias_deviation(observed: Sequence[Observed], reference: Sequence[ReferenceStep]) -> float:
    """Of the expert biases after each step, on every rank."""
    worst = []
    for one in observed:
        for biases, step in zip(one.biases, reference, strict=True):
            assert biases, "a rank has no expert bias"
            # Stages hold different layers: each of them must be one of the loop's.
            for bias in biases:
                apart = [between_tensors(bias.double(), b) for b in step.biases]
                worst.append(min(apart))
    return largest(worst)


_gradients: dict[tuple[str, int], list[dict[str, Any]]] = {}


def between_layouts(choice: Choice, observed: Sequence[Observed]) -> float:
    """Gradients against those of the first layout of the same kind and tensor-parallel size."""
    whole = [
        assemble([one.gradients[n] for one in observed]) for n in range(len(observed[0].gradients))
    ]
    first = _gradients.setdefault((choice[0], choice[1].tp), whole)
    return largest(tensor_deviation(a, b) for a, b in zip(whole, first, strict=True))


@pytest.mark.parametrize(
    "choice",
    [
        FAST[0],
        *(pytest.param(c, marks=slow) for c in FAST[1:]),
        *(pytest.param(c, marks=full) for c in REST),
    ],
    ids=name_of,
)
def test_equals_the_independent_loop(choice: Choice, short_path: Path, record: Record) -> None:
    kind = choice[0]
    recipe = recipe_of(kind)
    observed = run(choice, short_path, recipe, note_and_keep_float64)
    reference = expected(kind, recipe, observed)
    if kind == "load balancing":
        whole = train(make_steps(SHORT_SIZES)[:1], recipe, KINDS[kind][0])
        record("spread", name_of(choice), spread(reference[0], whole[0], observed[0].notes[0]))
    found = deviations(observed, reference)
    found["logged"] = logged_deviation(observed, reference)
    if kind == "expert bias":
        found["bias"] = bias_deviation(observed, reference)
    if kind != "load balancing":
        found["between layouts"] = between_layouts(choice, observed)
    record("experts", name_of(choice), found)
    # Megatron keeps the counts of the load-balancing loss, and the biases, in float32.
    bar = 1e-6 if kind == "load balancing" else 1e-9
    assert max(found["gradients"], found["parameters"], found["metrics"]) < bar
    assert found["logged"] < 5e-6
    assert found.get("bias", 0.0) < 1e-6
    assert found.get("between layouts", 0.0) < 1e-9
    assert max(found["learning rate"], found["consumed"]) < 1e-12


@slow
@pytest.mark.parametrize("choice", FAST, ids=name_of)
def test_with_float32_inside(choice: Choice, short_path: Path, record: Record) -> None:
    """As Megatron is: scores and cross entropy in float32 whatever the model."""
    kind = choice[0]
    # An epsilon that keeps the rounding of vanishing gradients small.
    recipe = recipe_of(kind, epsilon=1e-4)
    observed = run(choice, short_path, recipe, note_partitions)
    found = deviations(observed, expected(kind, recipe, observed))
    record("experts, float32 inside", name_of(choice), found)
    assert max(found["gradients"], found["parameters"], found["metrics"]) < 5e-6
    assert max(found["learning rate"], found["consumed"]) < 1e-12


def spread(packed: ReferenceStep, whole: ReferenceStep, partition: Partition) -> dict[str, Any]:
    """How far the load-balancing loss and the gradients of a step depend on its micro-batches."""
    (name,) = whole.logged
    return {
        "micro-batches": str(len(partition)),
        "loss": relative(packed.logged[name], whole.logged[name]),
        "gradients": tensor_deviation(packed.gradients, whole.gradients),
    }


@slow
def test_few_trained_tokens_leave_the_auxiliary_weight_alone(tmp_path: Path) -> None:
    # A tenth of the response tokens: with per-token loss Megatron divides by trained tokens.
    auxiliary = Auxiliary(z_loss=0.1, balance=1.0)
    recipe = dataclasses.replace(recipe_of("z-loss"), auxiliary=auxiliary)
    steps = make_steps(SHORT_SIZES, trained=0.1)
    write_batches(tmp_path / "rollouts", steps)
    gradients = []
    for per_token in (False, True):
        flags = {
            **batch_flags(tmp_path / "rollouts", SHORT_SIZES),
            **DP2.flags(),
            "micro-batch-width": "variable",
            "calculate-per-token-loss": per_token,
        }
        cell = Cell(2, flags, recipe, EXPERTS, script=OWN_SCRIPT, prepare=note_and_keep_float64)
        observed = run_cell(cell)
        reference = train(steps, recipe, EXPERTS, partitions=observed[0].notes)
        found = deviations(observed, reference)
        assert max(found["gradients"], found["metrics"]) < 1e-6
        assert logged_deviation(observed, reference) < 5e-6
        gradients.append(assemble([one.gradients[0] for one in observed]))
    assert tensor_deviation(*gradients) < 1e-6


@slow
@pytest.mark.parametrize("layout", [DP2, pytest.param(PP2, marks=full)], ids=lambda x: x.name)
def test_auxiliary_losses_carry_the_loss_scale_of_fp16(layout: Layout, short_path: Path) -> None:
    # The auxiliary loss makes up most of the gradient, which half precision blurs a little. The
    # weights stay: rounded to half precision they would soon be others than the loop's.
    auxiliary = Auxiliary(z_loss=5.0)
    recipe = Recipe(learning_rate=1e-9, decay=sum(SHORT_SIZES), auxiliary=auxiliary)
    flags = {
        **batch_flags(short_path, SHORT_SIZES),
        **layout.flags(),
        "fp16": True,
        "initial-loss-scale": 256.0,
    }
    rows = run_cell(Cell(layout.ranks, flags, recipe, EXPERTS))[-1].rows
    with_loss = train(make_steps(SHORT_SIZES), recipe, EXPERTS)
    (alone,) = train(make_steps(SHORT_SIZES)[:1], Recipe(), EXPERTS)
    assert with_loss[0].grad_norm > 2 * alone.grad_norm
    for row, step in zip(rows, with_loss, strict=True):
        assert row["grad_norm"] == pytest.approx(step.grad_norm, rel=2e-2)
