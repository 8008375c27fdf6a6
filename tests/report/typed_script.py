"""A pretrain script whose loss reports metrics of every kind."""

import argparse
from functools import partial
from typing import Any

import torch
from megatron.core.enums import ModelType
from megatron.training import get_args, pretrain
from megatron.training.argument_utils import pretrain_cfg_container_from_args
from megatron.training.arguments import parse_and_validate_args
from torch import Tensor

import megatron_dynbatch
from examples.pretrain_gpt_sft import datasets_provider, model_provider
from megatron_dynbatch.losses import sft
from megatron_dynbatch.report import Metric


def every_kind(output: Tensor, *, microbatch: Any) -> tuple[Tensor, dict[str, Any]]:
    """Cross entropy, and counts of the labels."""
    loss, report = sft(output, microbatch)
    x, mask = microbatch.labels.double() + 1, microbatch.loss_mask
    return loss, report | {
        "smallest": Metric.least(x, mask),
        "largest": Metric.largest(x, mask),
        "tokens": Metric.count(mask.sum()),
        "sum": Metric.total((x * mask).sum()),
    }


def one_rank_reports_more(output: Tensor, *, microbatch: Any) -> tuple[Tensor, dict[str, Any]]:
    """A metric that depends on where it runs."""
    loss, report = sft(output, microbatch)
    return loss, report | ({"extra": loss} if microbatch.dp_rank == 1 else {})


def add_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """This script's own option."""
    parser.add_argument("--test-loss", required=True)
    return parser


def forward_step(data_iterator: Any, model: torch.nn.Module) -> tuple[Tensor, Any]:
    """Token losses of one micro-batch."""
    batch = megatron_dynbatch.get_batch(data_iterator)
    output = model(
        batch.tokens,
        batch.position_ids,
        None,
        labels=batch.labels,
        packed_seq_params=batch.packed_seq_params(),
    )
    return output, partial(globals()[get_args().test_loss])


if __name__ == "__main__":
    args = parse_and_validate_args(
        extra_args_provider=add_arguments, args_defaults={"tokenizer_type": "NullTokenizer"}
    )
    pretrain(
        pretrain_cfg_container_from_args(args),
        datasets_provider,
        ModelType.encoder_or_decoder,
        forward_step,
        model_provider,
    )
