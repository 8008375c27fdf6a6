"""A pretrain script whose loss is chosen by name: all of the package's at once, or a wrong one.

Wrong losses are the usual ways to divide in the wrong place. Each takes `microbatch`, as an honest
author would, and each is right for one micro-batch on one rank.
"""

import argparse
from typing import Any

import torch
from megatron.core import mpu
from megatron.core.enums import ModelType
from megatron.training import get_args, pretrain
from megatron.training.argument_utils import pretrain_cfg_container_from_args
from megatron.training.arguments import parse_and_validate_args
from torch import Tensor

import megatron_dynbatch
from examples.pretrain_gpt_sft import datasets_provider, model_provider
from megatron_dynbatch import losses
from megatron_dynbatch.losses import token_log_probs
from tests.cli.loss_variants import VARIANTS

Result = tuple[Tensor, dict[str, Tensor]]

def every_loss(output: Tensor, *, microbatch: Any) -> Result:
    """The sum of all losses, each with a weight of its own so that no two can cancel."""
    groups = {
        "tp_group": mpu.get_tensor_model_parallel_group(),
        "cp_group": mpu.get_context_parallel_group(),
    }
    total, report = losses.sft(output, microbatch, tp_group=groups["tp_group"])
    value_loss, sums = losses.value(output[..., 0], microbatch)
    total = total + 0.37 * value_loss
    report |= {f"value {name}": x for name, x in sums.items()}
    for number, (name, options) in enumerate(VARIANTS.items()):
        loss, sums = getattr(losses, name)(output, microbatch, **groups, **options)
        total = total + loss / (1.3 + number)
        report |= {f"{name} {key}": x for key, x in sums.items()}
    return total, report


def _cross_entropy(output: Tensor, microbatch: Any) -> Tensor:
    return -token_log_probs(output, microbatch)[0]


def mean_of_means(output: Tensor, *, microbatch: Any) -> Result:
    """Mean over the trained tokens of this micro-batch."""
    x, mask = _cross_entropy(output, microbatch), microbatch.loss_mask.reshape(-1)
    loss = (x * mask).sum() / mask.sum().clamp(min=1)
    return loss, {"lm loss": loss}


def denominators_of_the_micro_batch(output: Tensor, *, microbatch: Any) -> Result:
    """Each rollout's mean, with the siblings that happen to be in this micro-batch."""
    x, mask = _cross_entropy(output, microbatch), microbatch.loss_mask.reshape(-1).double()
    table = microbatch.segments
    owner = torch.from_numpy(table.samples)
    sums = torch.zeros(table.num_samples + 1, dtype=torch.float64).index_add_(0, owner, mask)
    # Samples of equal denominator are siblings here.
    _, sibling = torch.from_numpy(microbatch.sample_denoms).unique(return_inverse=True)
    together = torch.zeros(table.num_samples, dtype=torch.float64)
    if table.num_samples:
        together = together.index_add_(0, sibling, sums[:-1])[sibling]
    denominators = torch.cat([together, torch.ones(1)]).clamp(min=1)[owner]
    loss = (x * mask / denominators).sum()
    return loss, {"lm loss": loss}


def context_parallel_local_counts(output: Tensor, *, microbatch: Any) -> Result:
    """Each sample's mean over the tokens that this context-parallel rank has."""
    x, mask = _cross_entropy(output, microbatch), microbatch.loss_mask.reshape(-1).double()
    table = microbatch.segments
    owner = torch.from_numpy(table.samples)
    counts = torch.zeros(table.num_samples + 1, dtype=torch.float64).index_add_(0, owner, mask)
    loss = (x * mask / counts.clamp(min=1)[owner]).sum()
    return loss, {"lm loss": loss}


def double_division(output: Tensor, *, microbatch: Any) -> Result:
    """The right sum, divided by the rollouts of the step once more."""
    loss = microbatch.mean(_cross_entropy(output, microbatch))
    loss = loss / microbatch.step.step_global_batch_size
    return loss, {"lm loss": loss}


def clamped_empty_samples(output: Tensor, *, microbatch: Any) -> Result:
    """A mean over samples made of a mean over rollouts; empty ones count as one of them."""
    step = microbatch.step
    loss = microbatch.mean(_cross_entropy(output, microbatch))
    loss = loss * step.step_global_batch_size / step.num_samples
    return loss, {"lm loss": loss}


def wrong_under_dp(output: Tensor, *, microbatch: Any) -> Result:
    """The right sum, divided by the number of data-parallel ranks once more."""
    loss = microbatch.mean(_cross_entropy(output, microbatch))
    loss = loss / mpu.get_data_parallel_world_size()
    return loss, {"lm loss": loss}


def wrong_metric_only(output: Tensor, *, microbatch: Any) -> Result:
    """A right loss beside a metric that is the mean of one micro-batch."""
    x, mask = _cross_entropy(output, microbatch), microbatch.loss_mask.reshape(-1)
    loss = microbatch.mean(x)
    return loss, {"lm loss": loss, "nll": (x * mask).sum() / mask.sum().clamp(min=1)}


def raises_under_cp(output: Tensor, *, microbatch: Any) -> Result:
    """Forgets the group that a loss per sequence needs."""
    return losses.gspo(output, microbatch)


def add_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """This script's own option."""
    parser.add_argument("--test-loss", required=True)
    return parser


def forward_step(data_iterator: Any, model: torch.nn.Module) -> tuple[Tensor, Any]:
    """Logits of one micro-batch."""
    batch = megatron_dynbatch.get_batch(data_iterator)
    output = model(
        batch.tokens, batch.position_ids, None, packed_seq_params=batch.packed_seq_params()
    )
    return output, globals()[get_args().test_loss]


def main() -> None:
    """Parse and train."""
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


if __name__ == "__main__":
    main()
