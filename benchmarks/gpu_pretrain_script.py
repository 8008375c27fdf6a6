"""The training process of `gpu_pretrain.py`: Megatron's pretrain with the policy loss.

`CHECK_DEVICE` says cuda or cpu; to the file `CHECK_WAITS` goes every place of our loss path that
made the host wait for the GPU.
"""

import os
import socket
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

ON_GPU = os.environ["CHECK_DEVICE"] == "cuda"
LOSS_PATH = (
    "/megatron_dynbatch/reduce/",
    "/megatron_dynbatch/losses/",
    "/megatron_dynbatch/logprob/",
)


def prepare() -> None:
    """Install the hooks, and on a GPU an attention that knows packed sequences."""
    from megatron_dynbatch import run

    if not ON_GPU:
        run.prepare(cpu=True)
        return
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1")
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=port, CUDA_DEVICE_MAX_CONNECTIONS="1")
    from megatron_dynbatch.cpu import megatron_patches
    from megatron_dynbatch.hooks import refusals

    megatron_patches._dataset_helpers()
    megatron_patches._packed_attention()
    # It refuses the local attention on a GPU, which has just been replaced.
    refusals.on_cpu = lambda: True
    run.prepare(cpu=False)


def note_waits() -> list[str]:
    """From now on, places in our loss path where torch warns of a synchronizing operation."""
    waits: list[str] = []

    def note(message: Any, category: type, filename: str, lineno: int, *_: Any) -> None:
        if "synchronizing" in str(message) and any(part in filename for part in LOSS_PATH):
            waits.append(f"{filename}:{lineno}")

    warnings.simplefilter("default")
    warnings.showwarning = note
    torch.cuda.set_sync_debug_mode("warn")
    return waits


def loss_function(output: Tensor, *, microbatch: Any) -> tuple[Tensor, dict[str, Tensor]]:
    """Clipped surrogate with a KL term: weights, the fused loss and its backward."""
    from megatron_dynbatch.losses import policy

    return policy(output, microbatch, kl="k3", kl_coef=0.05)


def forward_step(data_iterator: Any, model: Any) -> tuple[Tensor, Callable[..., Any]]:
    """Run the model on one micro-batch; it returns token losses, minus the log-probs."""
    import megatron_dynbatch

    batch = megatron_dynbatch.get_batch(data_iterator)
    output = model(
        batch.tokens,
        batch.position_ids,
        None,
        labels=batch.labels,
        packed_seq_params=batch.packed_seq_params(),
    )
    return output, loss_function


def main() -> None:
    """Train, then write what was noted."""
    prepare()
    from megatron.core.enums import ModelType
    from megatron.training import pretrain
    from megatron.training.argument_utils import pretrain_cfg_container_from_args
    from megatron.training.arguments import parse_and_validate_args

    from examples.pretrain_gpt_sft import datasets_provider, model_provider

    args = parse_and_validate_args(args_defaults={"tokenizer_type": "NullTokenizer"})
    waits = note_waits() if ON_GPU else []
    pretrain(
        pretrain_cfg_container_from_args(args),
        datasets_provider,
        ModelType.encoder_or_decoder,
        forward_step,
        model_provider,
    )
    Path(os.environ["CHECK_WAITS"]).write_text("\n".join(sorted(set(waits))))


if __name__ == "__main__":
    main()
