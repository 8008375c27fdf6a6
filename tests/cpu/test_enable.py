"""What `enable()` promises: idempotence, devices in every phase, defaults that users override."""

from __future__ import annotations

import argparse
from typing import Any

import torch

from tests.cpu.training import train
from tests.pool import run_ranks


class _MakesTensorInBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return grad * torch.full((1,), 2.0, device=f"cuda:{torch.cuda.current_device()}")


def devices() -> None:
    from megatron_dynbatch import cpu

    patched = torch.cuda.current_device, torch.distributed.isend, torch.Tensor.cuda
    cpu.enable()
    assert patched == (torch.cuda.current_device, torch.distributed.isend, torch.Tensor.cuda)
    assert torch.zeros(2, device="cuda").device.type == "cpu"
    assert torch.zeros(2).to(0).cuda().pin_memory().device.type == "cpu"
    assert torch.zeros(2).to(torch.device("cuda", 0), torch.float64).dtype == torch.float64
    assert torch.zeros(2).type() == "torch.cuda.FloatTensor"
    assert torch.zeros(2).type("torch.cuda.DoubleTensor").dtype == torch.float64
    x = torch.ones(1, requires_grad=True)
    _MakesTensorInBackward.apply(x).sum().backward()
    (grad,) = torch.autograd.grad(_MakesTensorInBackward.apply(x).sum(), x)
    assert grad == x.grad == 2.0


def parsed(argv: list[str], *names: str) -> list[Any]:
    from megatron.training.arguments import add_megatron_arguments

    parser = add_megatron_arguments(argparse.ArgumentParser(allow_abbrev=False))
    args = parser.parse_args(argv)
    return [getattr(args, name) for name in names]


def random_states() -> tuple[float, float]:
    """Draws inside and outside of Megatron's model-parallel random state, by tensor rank."""
    from megatron.core import mpu, tensor_parallel

    mpu.initialize_model_parallel(tensor_model_parallel_size=2)
    tensor_parallel.model_parallel_cuda_manual_seed(1)
    with tensor_parallel.get_cuda_rng_tracker().fork():
        inside = torch.rand(()).item()
    return inside, torch.rand(()).item()


def two_trainings() -> tuple[list[dict[str, float]], list[dict[str, float]]]:
    first = train(["--train-iters", "2"], weights_seed=None)
    train(["--train-iters", "1", "--num-layers", "1", "--seed", "5"])
    return first.rows, train(["--train-iters", "2"], weights_seed=None).rows


def test_devices_and_idempotence() -> None:
    run_ranks(1, devices, process_group=False)


def test_flags_of_the_user_win_over_cpu_defaults() -> None:
    names = ("distributed_backend", "transformer_impl", "num_workers")
    (plain,) = run_ranks(1, parsed, [], *names, process_group=False)
    assert plain == ["gloo", "local", 0]
    argv = ["--num-workers", "3", "--transformer-impl", "transformer_engine"]
    (own,) = run_ranks(1, parsed, argv, *names, process_group=False)
    assert own == ["gloo", "transformer_engine", 3]


def test_model_parallel_random_state_differs_by_tensor_rank() -> None:
    (inside0, outside0), (inside1, outside1) = run_ranks(2, random_states)
    assert inside0 != inside1
    assert outside0 == outside1


def test_two_trainings_in_one_process_do_not_touch_each_other() -> None:
    ((first, second),) = run_ranks(1, two_trainings)
    assert first == second
