"""The order of passes, recorded while Megatron's own schedules run a real training."""

from __future__ import annotations

from typing import Any

import pytest

from megatron_dynbatch.plan import ParallelLayout
from megatron_dynbatch.plan.step_time import stage_order

pytest.importorskip("megatron.training")

from tests.cpu.training import train_ranks  # noqa: E402

LAYOUTS = {
    "PP2": (ParallelLayout(pp=2), ()),
    "PP4": (ParallelLayout(pp=4), ()),
    "PP2xVPP2": (ParallelLayout(pp=2, vpp=2), ("--num-layers-per-virtual-pipeline-stage", "1")),
}
# (is it forward, micro-batch, model chunk) of each pass that this rank has run.
PASSES: list[tuple[bool, int, int]] = []


def record(chunks: list[Any], optimizer: Any) -> None:
    """Wrap the functions through which both schedules run every pass."""
    from megatron.core.pipeline_parallel import schedules

    forward_step, backward_step = schedules.forward_step, schedules.backward_step
    # A backward pass is known by the output of its forward pass, which it starts from.
    outputs: list[tuple[Any, int, int]] = []

    def forward(*args: Any, **kwargs: Any) -> Any:
        answer = forward_step(*args, **kwargs)
        micro_batch, chunk = kwargs["current_microbatch"], kwargs.get("vp_stage") or 0
        PASSES.append((True, micro_batch, chunk))
        outputs.append((_first(answer[0]), micro_batch, chunk))
        return answer

    def backward(input_tensor: Any, output_tensor: Any, *args: Any) -> Any:
        ((micro_batch, chunk),) = [
            key for output, *key in outputs if output is _first(output_tensor)
        ]
        PASSES.append((False, micro_batch, chunk))
        return backward_step(input_tensor, output_tensor, *args)

    schedules.forward_step, schedules.backward_step = forward, backward


def _first(tensors: Any) -> Any:
    return tensors[0] if isinstance(tensors, list) else tensors


def recorded(chunks: list[Any], optimizer: Any) -> list[tuple[bool, int, int]]:
    """What this rank has run."""
    return PASSES


@pytest.mark.parametrize("name", LAYOUTS)
def test_stages_run_passes_in_the_modelled_order(name: str) -> None:
    layout, flags = LAYOUTS[name]
    count = 6
    argv = [
        *("--num-layers", "4", "--train-iters", "1", "--global-batch-size", str(count)),
        *("--pipeline-model-parallel-size", str(layout.pp), *flags),
    ]
    trainings = train_ranks(layout.pp, argv, before=record, collect=recorded)
    for stage, training in enumerate(trainings):
        modelled = stage_order(stage, count, layout)
        expected = [(item.is_forward, item.micro_batch, item.chunk) for item in modelled]
        assert training.collected == expected
