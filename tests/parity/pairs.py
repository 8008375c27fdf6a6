"""``python -m tests.parity.pairs``: write the trainings of `megatron_dynbatch.hooks.proven` anew.

A training has the traits of its line and no others. It is compared with every sample alone and
unpacked through Megatron's own model (`alone`); terms of routers are the closed forms of
`reference_aux` on the logits of those routers.
"""

from __future__ import annotations

import functools
import inspect
import re
import textwrap
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from megatron_dynbatch.hooks import proven
from tests.parity.alone import Alone, closed_forms, start_from_drawn_weights
from tests.parity.job import NOTES, OWN_SCRIPT, Cell, Observed, Shard, assemble, run_cell, shards_of
from tests.parity.reference import Recipe
from tests.parity.reference_aux import Partition
from tests.parity.rollouts import CAPACITY, batch_flags, make_steps
from tests.parity.traits_flags import (
    REDUCTIONS,
    Traits,
    auxiliary_of,
    covering_rows,
    layout_of,
    model_flags,
    training_flags,
)

SIZES = (8,)
STEP = make_steps(SIZES)[0]


def recipe_of(traits: Traits) -> Recipe:
    """One step without clipping."""
    return Recipe(
        reduction=next(name for name in REDUCTIONS if f"{name}-mean" in traits),
        loss_constant=9.0,
        empty_rollouts="skip" if "empty-skipped" in traits else "count",
        decay=sum(SIZES),
        clip_grad=0.0,
        epsilon=1e-8,
    )


def train(traits: Traits, path: Path, loss_head: str) -> list[Observed]:
    """The training with these traits, under the plugin; each rank's notes are a dict."""
    flags = {**batch_flags(path, SIZES), **training_flags(traits), "loss-head": loss_head}
    cell = Cell(
        layout_of(traits).ranks, flags, recipe_of(traits), script=OWN_SCRIPT,
        overwrite_weights=False, prepare=note_all,
    )  # fmt: skip
    return run_cell(cell)


def note_all() -> None:
    """Note micro-batches, traits, and the gradients that the optimizer is given."""
    from megatron.training import get_args, training

    from megatron_dynbatch.hooks.traits import traits_of
    from tests.parity.test_experts import note_partitions

    note_partitions()
    start_from_drawn_weights()
    loop = training.train

    def train(*positional: Any, **named: Any) -> Any:
        given = inspect.signature(loop).bind(*positional, **named).arguments
        model, optimizer = given["model"], given["optimizer"]
        NOTES.append({trait.name for trait in traits_of(get_args())})
        step = optimizer.step

        @functools.wraps(step)
        def noted(*args: Any, **kwargs: Any) -> Any:
            NOTES.append(owned_gradients(model, optimizer))
            return step(*args, **kwargs)

        optimizer.step = noted
        return loop(*positional, **named)

    train.__signature__ = inspect.signature(loop)  # type: ignore[attr-defined]
    training.train = train


def owned_gradients(model: Sequence[Any], optimizer: Any) -> dict[str, Shard]:
    """This rank's gradients; NaN where a distributed optimizer leaves them to another rank."""
    ranges = {}
    for one in getattr(optimizer, "chained_optimizers", [optimizer]):
        for parameter in getattr(one, "model_param_gbuf_map", ()):
            ranges[parameter] = one._get_model_param_range_map(parameter)["param"]
    is_distributed = optimizer.config.use_distributed_optimizer

    def owned(parameter: Any) -> torch.Tensor:
        gradient: torch.Tensor = parameter.main_grad
        if not is_distributed:
            return gradient
        own = torch.full_like(gradient, torch.nan)
        if (part := ranges.get(parameter)) is not None:
            place = slice(part.start, part.end)
            own.view(-1)[place] = gradient.view(-1)[place]
        return own

    return shards_of(model, owned)


def whole_gradients(parts: Sequence[Mapping[str, Shard]]) -> dict[str, torch.Tensor]:
    """The gradients of the model, from what each rank owns."""
    owned: dict[tuple[str, int], torch.Tensor] = {}
    for part in parts:
        for name, shard in part.items():
            known = owned.setdefault((name, shard.rank), shard.values)
            owned[name, shard.rank] = torch.where(known.isnan(), shard.values, known)
    for part in parts:
        for name, shard in part.items():
            whole = owned[name, shard.rank]
            shard.values = torch.where(shard.values.isnan(), whole, shard.values)
    return assemble(parts)


def every_sample_alone(traits: Traits, partition: Partition) -> Alone:
    """The reference, without the plugin."""
    flags = {
        **model_flags(traits), "sft": True, "no-create-attention-mask-in-dataloader": True,
        "seq-length": CAPACITY, "max-tokens-per-gpu": None, "micro-batch-size": 1,
        "global-batch-size": 1, "train-samples": 8, "loss-head": "stock",
    }  # fmt: skip
    prepare = functools.partial(
        closed_forms, STEP, recipe_of(traits), auxiliary_of(traits), partition
    )
    cell = Cell(
        1, flags, recipe_of(traits), script=OWN_SCRIPT, plugin=False, overwrite_weights=False,
        prepare=prepare,
    )  # fmt: skip
    found: Alone = run_cell(cell)[0].notes[0]
    return found


def module_text(rows: Sequence[Traits]) -> str:
    """The module of proven trainings with these rows."""
    lines = [
        textwrap.fill(
            " ".join([str(number), *sorted(row)]), 98, subsequent_indent="    ",
            break_on_hyphens=False,
        )
        for number, row in enumerate(rows, 1)
    ]  # fmt: skip
    text = Path(proven.__file__).read_text(encoding="utf-8")
    trainings = "\n\n".join(lines)
    write: Callable[[re.Match[str]], str] = lambda found: f"{found[1]}{trainings}\n{found[2]}"  # noqa: E731
    return re.sub(r'(_TRAININGS = """\n).*?(""")', write, text, count=1, flags=re.DOTALL)


if __name__ == "__main__":
    Path(proven.__file__).write_text(module_text(covering_rows()), encoding="utf-8")
