"""The training side of `examples.grpo_async_ray`: Megatron's pretrain, and where weights go.

Whenever a batch opens (and before the first one) every rank gathers the weights, rank 0 writes them
to --weights-dir and tells the generators which version they are.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.enums import ModelType
from megatron.training import get_args, pretrain
from megatron.training.argument_utils import pretrain_cfg_container_from_args
from megatron.training.arguments import parse_and_validate_args

import megatron_dynbatch
from examples.demo.weights import full_weights
from examples.grpo_sync import forward_step
from examples.pretrain_gpt_sft import datasets_provider, model_provider
from megatron_dynbatch import Sample
from megatron_dynbatch.rollouts import open_transport
from megatron_dynbatch.rollouts.flow import publish_weights
from megatron_dynbatch.steps import Cursor, OpenBatch

KEPT_VERSIONS = 3

_published = -1


def add_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Options of the example."""
    parser.add_argument("--weights-dir", type=Path, required=True)
    return parser


def publish(version: int, model: Sequence[Any]) -> None:
    """Hand the weights, trained on `version` batches, to the generators; on every rank."""
    global _published
    if version == _published:
        return
    _published = version
    weights = full_weights(model)
    if dist.get_rank() == 0:
        args = get_args()
        path = args.weights_dir / f"weights-{version:08d}.pt"
        args.weights_dir.mkdir(parents=True, exist_ok=True)
        temporary = path.with_suffix(".tmp")
        torch.save(weights, temporary)
        os.replace(temporary, path)
        publish_weights(open_transport(args.rollout_path), version, str(path))
        for old in sorted(args.weights_dir.glob("weights-*.pt"))[:-KEPT_VERSIONS]:
            old.unlink()


def publish_when_needed(cursor: Cursor, model: Sequence[Any]) -> None:
    """The generators wait for new weights while training waits for them."""
    publish(cursor.batch_id, model)


def publish_when_opened(batch: OpenBatch, model: Sequence[Any]) -> Mapping[int, Sample]:
    """All batches before this one are trained."""
    publish(batch.batch_id, model)
    return batch.samples


def main() -> None:
    """Parse, register both seams, train."""
    megatron_dynbatch.install()
    args = parse_and_validate_args(
        extra_args_provider=add_arguments, args_defaults={"tokenizer_type": "NullTokenizer"}
    )
    megatron_dynbatch.on_batch_needed(publish_when_needed)
    megatron_dynbatch.on_batch_opened(publish_when_opened)
    pretrain(
        pretrain_cfg_container_from_args(args),
        datasets_provider,
        ModelType.encoder_or_decoder,
        forward_step,
        model_provider,
    )


if __name__ == "__main__":
    main()
