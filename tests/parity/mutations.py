"""Break one factor at a time and see the comparison with the independent loop fail.

    python -m tests.parity.mutations

prints one line per mutation: what was broken, and the largest deviations found (the bar is 1e-9).
"""

from __future__ import annotations

import dataclasses
import math
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from tests.parity.compare import deviations
from tests.parity.job import OWN_SCRIPT, Cell, run_cell
from tests.parity.layouts import Layout
from tests.parity.reference import Recipe, ReferenceStep, train
from tests.parity.rollouts import SHORT_SIZES, batch_flags, make_steps, write_batches

BAR = 1e-9
RECIPE = Recipe(clip_grad=0.0, epsilon=1e-8, decay=30, weight_decay=0.05, end_weight_decay=0.2)


def put(module: Any, name: str, value: Any) -> None:
    """Replace something that is there by its mutation, in this process."""
    assert hasattr(module, name)
    setattr(module, name, value)


def scale_with(**wrong: int) -> None:
    """Add to M, W or B where the loss is scaled."""
    from megatron_dynbatch.hooks import loss

    right = loss.megatron_loss

    def mutated(local_sum: Any, step: Any, layout: Any, **named: Any) -> Any:
        scaled, num_tokens, count = right(local_sum, step, layout, **named)
        shares = step.num_microbatches * layout.dp * layout.cp
        other = (step.num_microbatches + wrong.get("m", 0)) * (
            layout.dp * layout.cp + wrong.get("w", 0)
        )
        b = step.loss_denominator
        return scaled * (other / shares) * (b / (b + wrong.get("b", 0))), num_tokens, count

    put(loss, "megatron_loss", mutated)


def report_times(factor: float) -> None:
    """Report a mean over another count than B; gradients stay right."""
    from megatron_dynbatch.hooks import loss

    right = loss.megatron_loss

    def mutated(*positional: Any, **named: Any) -> Any:
        scaled, num_tokens, count = right(*positional, **named)
        return scaled, num_tokens, count * factor

    put(loss, "megatron_loss", mutated)


def report_nan() -> None:
    """Report a metric that is no number."""
    from megatron_dynbatch.hooks import loss

    right = loss._typed

    def mutated(report: Any, count: float) -> Any:
        return right({name: value * math.nan for name, value in report.items()}, count)

    put(loss, "_typed", mutated)


def poison(gradient: bool) -> None:
    """One entry of the last step's gradient, or of a parameter after it, is no number."""
    from megatron.core.optimizer import optimizer
    from megatron.training import training

    step = optimizer.FP32Optimizer.step_with_ready_grads
    steps: list[None] = []

    def is_last() -> bool:
        return len(steps) == len(SHORT_SIZES)

    def embedding(of: Any) -> Any:
        return next(p for p in of.get_parameters() if p.dim() > 1)

    def poisoned_step(self: Any) -> Any:
        answer = step(self)
        if is_last() and not gradient:
            embedding(self).data.view(-1)[0] = math.nan
        return answer

    put(optimizer.FP32Optimizer, "step_with_ready_grads", poisoned_step)
    finalize = training.finalize_model_grads

    def poisoned_gradients(model: Any, *rest: Any, **named: Any) -> None:
        finalize(model, *rest, **named)
        steps.append(None)
        if is_last() and gradient:
            next(model[0].parameters()).main_grad.view(-1)[0] = math.nan

    put(training, "finalize_model_grads", poisoned_gradients)


def cut_in_order() -> None:
    """Give each context-parallel rank a contiguous part instead of the zigzag."""
    from megatron_dynbatch.geometry import pack_layout

    def contiguous(cu_seqlens: Any, cp_size: int, cp_rank: int) -> Any:
        local = int(cu_seqlens[-1]) // cp_size
        return np.arange(cp_rank * local, (cp_rank + 1) * local)

    put(pack_layout, "zigzag_indices", contiguous)


def change_packs(field: str, change: Callable[[Any], Any]) -> None:
    """Change one array of every packed sequence."""
    from megatron_dynbatch.layout import micro_batch

    right = micro_batch.pack_samples

    def mutated(*positional: Any, **named: Any) -> Any:
        packed = right(*positional, **named)
        return dataclasses.replace(packed, **{field: change(getattr(packed, field))})

    put(micro_batch, "pack_samples", mutated)


def change_tensors(field: str, change: Callable[[Any], Any]) -> None:
    """Change one tensor of every micro-batch."""
    from megatron_dynbatch.steps import step

    right = step.slice_packed

    def mutated(*positional: Any, **named: Any) -> Any:
        micro_batch = right(*positional, **named)
        return dataclasses.replace(micro_batch, **{field: change(getattr(micro_batch, field))})

    put(step, "slice_packed", mutated)


def roll(array: Any) -> Any:
    """Off by one."""
    return np.roll(array, 1)


def restart_at_zero(array: Any) -> Any:
    """One attention sequence where there are several."""
    return array[[0, -1]]


def change_plans(change: Callable[[Any], Any]) -> None:
    """Hand out plans that `change` has made wrong, unchecked."""
    from megatron_dynbatch.plan import Plan
    from megatron_dynbatch.steps import announce

    right = announce.make_plan
    Plan.check = lambda self: None  # type: ignore[method-assign]
    announce.make_plan = lambda *positional, **named: change(right(*positional, **named))


def own_denominators(plan: Any) -> Any:
    """Each sample's own mask sum where the rollout's is right."""
    return dataclasses.replace(plan, sample_denoms=np.maximum(plan.index.mask_sums, 1))


def without_one(plan: Any) -> Any:
    """The first micro-batch of each step loses a sample."""
    return dataclasses.replace(plan, steps=tuple(map(_without_one, plan.steps)))


def _without_one(step: Any) -> Any:
    first, *others = step.micro_batches
    return dataclasses.replace(step, micro_batches=((first[0][1:], *first[1:]), *others))


def shift_without_prompt() -> None:
    """Columns of samples without a prompt lose their last entry in the place of the first."""
    from megatron_dynbatch.geometry import PackLayout, Spans
    from megatron_dynbatch.layout import packed_sequence

    right = packed_sequence._column

    class Cut(Spans):
        def joined(self, parts: Any, dtype: Any) -> Any:
            lengths = self.lengths.tolist()
            return super().joined([p[:n] for p, n in zip(parts, lengths, strict=True)], dtype)

    class FromTheFirst(PackLayout):
        num_unpredicted = property(lambda self: np.zeros_like(self.response_lengths))  # type: ignore[assignment]

    def mutated(batch: Any, rows: Any, name: str, pack: Any) -> Any:
        fields = {f.name: getattr(pack, f.name) for f in dataclasses.fields(pack) if f.init}
        of = pack.responses
        fields["responses"] = Cut(of.starts, of.lengths, of.num_rows)
        return right(batch, rows, name, FromTheFirst(**fields))

    put(packed_sequence, "_column", mutated)


def answer_site(name: str, answer: Callable[[Any, Any], Any]) -> None:
    """Let a named site answer something else."""
    from megatron.training import training

    training.__dict__["__dynbatch_sites__"][name] = answer


def count_micro_batches(stock: Any, frame: Any) -> int:
    """The micro-batches of the step instead of its rollouts."""
    from megatron.core.num_microbatches_calculator import get_num_microbatches

    return get_num_microbatches()


def count_samples(stock: Any, frame: Any) -> int:
    """The samples of the step instead of its rollouts."""
    from megatron_dynbatch.hooks.session import session

    run = session()
    assert run is not None and run.step is not None
    return run.step.plan.steps[run.step.step_index].num_samples


@dataclass(frozen=True)
class Mutation:
    """One broken factor, a layout in which it matters, and a quantity that must be off."""

    name: str
    layout: Layout
    apply: Callable[[], None]
    fails: str = ""
    objective: str = "sft"

    @property
    def recipe(self) -> Recipe:
        """Of the run and of the reference."""
        return dataclasses.replace(RECIPE, objective=self.objective)


FAST = (
    Mutation("NaN in the count", Layout(), partial(report_times, math.nan), "metrics"),
    Mutation("NaN in a metric", Layout(), report_nan, "metrics"),
    Mutation("NaN in a gradient", Layout(), partial(poison, True), "gradients"),
    Mutation("NaN in a parameter", Layout(), partial(poison, False), "parameters"),
    Mutation(
        "LR by samples",
        Layout(),
        partial(answer_site, "scheduler increment", count_samples),
        "learning rate",
    ),
    Mutation("columns shifted without a prompt", Layout(), shift_without_prompt, "metrics", "clip"),
)


MUTATIONS = (
    *FAST,
    Mutation("M + 1 in the loss scale", Layout(), partial(scale_with, m=1)),
    Mutation("W without context parallelism", Layout(cp=2), partial(scale_with, w=-1)),
    Mutation("W without data parallelism", Layout(dp=2), partial(scale_with, w=-1)),
    Mutation("B + 1 in the loss scale", Layout(pp=2), partial(scale_with, b=1)),
    Mutation("B off in the report", Layout(), partial(report_times, 1.01)),
    Mutation("contiguous parts instead of the zigzag", Layout(cp=2), cut_in_order),
    Mutation("labels off by one", Layout(), partial(change_packs, "labels", roll)),
    Mutation("weights off by one", Layout(), partial(change_packs, "token_weights", roll)),
    Mutation(
        "one attention sequence per micro-batch",
        Layout(),
        partial(change_tensors, "cu_seqlens_padded", restart_at_zero),
    ),
    Mutation("denominators per sample", Layout(dp=2), partial(change_plans, own_denominators)),
    Mutation("a sample left out", Layout(dp=2), partial(change_plans, without_one)),
    Mutation(
        "LR by micro-batches",
        Layout(),
        partial(answer_site, "scheduler increment", count_micro_batches),
    ),
)


def cell_of(mutation: Mutation, path: Path) -> Cell:
    """Float64, variable width, three steps."""
    layout = mutation.layout
    flags = {
        **batch_flags(path, SHORT_SIZES),
        **layout.flags(),
        "micro-batch-width": "variable",
        "loss-head": "policy" if mutation.objective == "clip" else "logits",
    }
    return Cell(layout.ranks, flags, mutation.recipe, script=OWN_SCRIPT, prepare=mutation.apply)


def what_fails(mutation: Mutation, path: Path, reference: list[ReferenceStep]) -> str:
    """The quantities that are off under a mutation, or the error it ends in; "" if none."""
    try:
        found = deviations(run_cell(cell_of(mutation, path)), reference)
    except AssertionError as error:
        lines = [line.strip() for line in str(error).splitlines() if "Error" in line]
        return lines[-1] if lines else str(error)
    # Megatron computes the norm in float32.
    wrong = {n: v for n, v in found.items() if v > (1e-6 if n == "grad norm" else BAR)}
    return ", ".join(f"{name} {value:.1e}" for name, value in wrong.items())


def main() -> int:
    """Print the table; 1 if a mutation survives."""
    survivors = 0
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "rollouts"
        write_batches(path, make_steps(SHORT_SIZES))
        nothing = Mutation("nothing", Layout(), do_nothing)
        for mutation in (nothing, *MUTATIONS):
            reference = train(make_steps(SHORT_SIZES), mutation.recipe)
            failing = what_fails(mutation, path, reference)
            is_seen = failing != "" and mutation.fails in failing
            survivors += is_seen == (mutation is nothing)
            print(f"{mutation.name} ({mutation.layout.name}): {failing or 'all equal'}", flush=True)
    return min(survivors, 1)


def do_nothing() -> None:
    """No mutation."""


if __name__ == "__main__":
    # The test jobs import what they run by its module's name.
    from tests.parity import mutations

    sys.exit(mutations.main())
