"""A pretrain script of one's own, in the precision and with the loss head asked for.

In `--precision float64` rounding hides no error larger than 1e-12. `--loss-head` says how token
losses are made: `logits` by the package in the logits' precision; `megatron` by Megatron's
vocabulary cross entropy, which computes in float32, summed by a loss function that returns a
2-tuple; `stock` the same with the 3-tuple of the stock script. The last two know no plugin.
`policy` trains the clipped policy loss on logits.
"""

import argparse
from functools import partial
from typing import Any

import torch
from megatron.core import mpu
from megatron.core.enums import ModelType
from megatron.training import get_args, pretrain

import megatron_dynbatch
from examples.pretrain_gpt_sft import datasets_provider, loss_func, model_provider
from megatron_dynbatch.losses import policy, sft


def add_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """This script's own options."""
    heads = ("logits", "megatron", "stock", "policy")
    parser.add_argument("--loss-head", choices=heads, default="logits")
    parser.add_argument("--precision", choices=("float32", "float64"), default="float64")
    return parser


def build_model(*positional: Any, **named: Any) -> torch.nn.Module:
    """This stage's part of the model, norms too in the precision asked for."""
    args = get_args()
    args.params_dtype = getattr(torch, args.precision)
    return model_provider(*positional, **named).to(args.params_dtype)


def sum_of_losses(output: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """A loss function that returns a 2-tuple."""
    return output.sum(), {"lm loss": output.detach().sum()}


def forward_step(data_iterator: Any, model: torch.nn.Module) -> tuple[torch.Tensor, Any]:
    """Run the model on one micro-batch."""
    head = get_args().loss_head
    batch = megatron_dynbatch.get_batch(data_iterator)
    output = model(
        batch.tokens,
        batch.position_ids,
        None,
        labels=None if head in ("logits", "policy") else batch.labels,
        loss_mask=batch.loss_mask,
        packed_seq_params=batch.packed_seq_params(),
    )
    if head == "megatron":
        return output, sum_of_losses
    if head == "stock":
        return output, partial(loss_func, batch.loss_mask)
    tp_group = mpu.get_tensor_model_parallel_group()
    if head == "policy":
        options: dict[str, Any] = {
            "dual_clip": 3.0,
            "kl": "k3",
            "kl_coef": 0.1,
            "entropy_coef": 0.01,
        }
        return output, partial(policy, tp_group=tp_group, **options)
    return output, partial(sft, tp_group=tp_group)


def main() -> None:
    """Parse, set the precision, train."""
    call: dict[str, Any] = {
        "train_valid_test_dataset_provider": datasets_provider,
        "model_provider": build_model,
        "model_type": ModelType.encoder_or_decoder,
        "forward_step_func": forward_step,
    }
    options: dict[str, Any] = {
        "extra_args_provider": add_arguments, "args_defaults": {"tokenizer_type": "NullTokenizer"}
    }  # fmt: skip
    try:
        from megatron.training.argument_utils import pretrain_cfg_container_from_args
        from megatron.training.arguments import parse_and_validate_args
    except ImportError:  # up to 0.17 pretrain parses the arguments itself
        pretrain(**call, **options)
        return
    args = parse_and_validate_args(**options)
    args.params_dtype = getattr(torch, args.precision)
    pretrain(cfg_container=pretrain_cfg_container_from_args(args), **call)


if __name__ == "__main__":
    main()
