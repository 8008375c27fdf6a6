"""A script with the two lines, right or with one planted fault that `verify --model` must find."""

import argparse
from typing import Any

import torch
from megatron.core import mpu
from megatron.core.enums import ModelType
from megatron.core.num_microbatches_calculator import get_num_microbatches
from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler
from megatron.training import get_args, pretrain
from megatron.training.argument_utils import pretrain_cfg_container_from_args
from megatron.training.arguments import parse_and_validate_args
from torch import Tensor

import megatron_dynbatch
from examples.pretrain_gpt_sft import datasets_provider, model_provider
from megatron_dynbatch.cpu import core_attention
from megatron_dynbatch.losses import token_log_probs

FAULTS = (
    "none", "mean", "attention", "positions", "term per micro-batch", "dummies", "router",
)  # fmt: skip


def add_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """This script's own option."""
    parser.add_argument("--fault", choices=FAULTS, default="none")
    return parser


def loss_function(output: Tensor, *, microbatch: Any) -> tuple[Tensor, dict[str, Tensor]]:
    """Cross entropy, summed as it must be, or not."""
    fault = get_args().fault
    x = -token_log_probs(output, microbatch, tp_group=mpu.get_tensor_model_parallel_group())[0]
    loss = microbatch.mean(x)
    if fault == "mean":
        mask = microbatch.loss_mask.reshape(-1)
        loss = (x * mask).sum() / mask.sum().clamp(min=1)
    elif fault == "term per micro-batch":
        loss = loss + 0.1 * output.square().mean()
    elif fault == "dummies":
        loss = loss + 0.1 * output[:, :1].mean() * microbatch.is_dummy
    return loss, {"lm loss": loss}


def forward_step(data_iterator: Any, model: torch.nn.Module) -> tuple[Tensor, Any]:
    """Logits of one micro-batch."""
    batch = megatron_dynbatch.get_batch(data_iterator)
    positions = batch.position_ids
    if get_args().fault == "positions":
        positions = torch.arange(batch.num_tokens)[None]
    output = model(batch.tokens, positions, None, packed_seq_params=batch.packed_seq_params())
    return output, loss_function


def _mean_over_micro_batches(context: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
    (loss,) = context.saved_tensors
    return gradient, torch.full_like(loss, 1 / get_num_microbatches())


def main() -> None:
    """Parse and train."""
    args = parse_and_validate_args(
        extra_args_provider=add_arguments, args_defaults={"tokenizer_type": "NullTokenizer"}
    )
    laid_out = core_attention._laid_out_lengths
    if args.fault == "attention":  # every token sees all samples before its own
        core_attention._laid_out_lengths = lambda params: laid_out(params)[[0, -1]]
    scaler, backward = MoEAuxLossAutoScaler, MoEAuxLossAutoScaler.backward
    if args.fault == "router":  # each micro-batch weighs alike, whatever it holds
        scaler.backward = staticmethod(_mean_over_micro_batches)
    try:
        pretrain(
            pretrain_cfg_container_from_args(args),
            datasets_provider,
            ModelType.encoder_or_decoder,
            forward_step,
            model_provider,
        )
    finally:
        core_attention._laid_out_lengths = laid_out
        scaler.backward = staticmethod(backward)


if __name__ == "__main__":
    main()
