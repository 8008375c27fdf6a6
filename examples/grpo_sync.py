r"""GRPO in one program: rollouts are generated at the step boundary and never touch a disk.

Every rank plays its share of the prompt groups with the weights as they are, the shares are
gathered, and each rank puts the same batch in its queue. The task, the agent and the sampler are
those of the demo (`examples.demo`): spelling words backward.

    torchrun --nproc-per-node 2 -m megatron_dynbatch.run --cpu --module examples.grpo_sync \
        --dynamic-global-batch --rollout-path queue:grpo --rollouts-per-step batch \
        --micro-batch-width variable --max-tokens-per-gpu 256 --train-samples 2000 \
        --attention-dropout 0 --hidden-dropout 0 …

Real size, an 8B model on 8 GPUs (the sampler in `make_rollouts` is then an engine's):

    torchrun --nproc-per-node 8 -m megatron_dynbatch.run --module examples.grpo_sync \
        --dynamic-global-batch --rollout-path queue:grpo --rollouts-per-step batch --groups 64 \
        --max-tokens-per-gpu 16384 --micro-batch-width variable --loss-reduction token \
        --lr 1e-6 --lr-decay-style constant --train-samples 100000 \
        --tensor-model-parallel-size 2 --sequence-parallel \
        --num-layers 32 --hidden-size 4096 --ffn-hidden-size 14336 --num-attention-heads 32 \
        --group-query-attention --num-query-groups 8 --normalization RMSNorm --swiglu \
        --disable-bias-linear --untie-embeddings-and-output-weights \
        --position-embedding-type rope --max-position-embeddings 16384 \
        --attention-dropout 0 --hidden-dropout 0 --bf16 --use-distributed-optimizer \
        --tokenizer-type HuggingFaceTokenizer --tokenizer-model /shared/model --eval-iters 0 \
        --load /shared/checkpoint --finetune --save /shared/run --save-interval 100
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from megatron.training import get_args
from torch import Tensor

import megatron_dynbatch
from examples.demo.agent import Episode, group_advantages, play, to_samples
from examples.demo.generator import Generator
from examples.demo.task import VOCAB_SIZE, Spelling
from examples.demo.weights import full_weights
from examples.tiny_gpt import train_gpt
from megatron_dynbatch import MicroBatch
from megatron_dynbatch.losses import policy
from megatron_dynbatch.rollouts import open_transport
from megatron_dynbatch.steps import Cursor


def add_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Options of the example."""
    group = parser.add_argument_group("GRPO")
    group.add_argument("--groups", type=int, default=8, help="prompt groups per batch")
    group.add_argument("--word-seed", type=int, default=1)
    return parser


def make_rollouts(cursor: Cursor, model: Sequence[Any]) -> None:
    """Generate the batch that training needs next; called on every rank."""
    args = get_args()
    rank, size = dist.get_rank(), dist.get_world_size()
    seed = (args.word_seed * 1_000_003 + cursor.batch_id) * size + rank
    sampler = Generator(
        full_weights(model), args.num_attention_heads, torch.Generator().manual_seed(seed)
    )
    first = cursor.batch_id * args.groups
    words = Spelling(args.word_seed, size=100_000)
    own = play(words, range(first + rank, first + args.groups, size), sampler, random.Random(seed))
    shares: list[list[Episode]] = [[] for _ in range(size)]
    dist.all_gather_object(shares, own)
    episodes = [episode for share in shares for episode in share]
    queue = open_transport(args.rollout_path, vocab_size=VOCAB_SIZE)
    queue.write(to_samples(episodes, group_advantages(episodes)))
    queue.delete_before(cursor.batch_id)  # trained; the queue keeps no more than it must


def forward_step(data_iterator: Any, model: Any) -> tuple[Tensor, Callable[..., Any]]:
    """Run the model on one micro-batch; it returns token losses, minus the log-probs."""
    batch = megatron_dynbatch.get_batch(data_iterator)
    output = model(
        batch.tokens,
        batch.position_ids,
        None,
        labels=batch.labels,
        packed_seq_params=batch.packed_seq_params(),
    )
    return output, loss_function


def loss_function(output: Tensor, *, microbatch: MicroBatch) -> tuple[Tensor, dict[str, Tensor]]:
    """The clipped policy loss; the plugin scales the sum that it returns."""
    return policy(output, microbatch, clip_high=0.28)


def main() -> None:
    """Register the policy seam, train."""
    megatron_dynbatch.install()
    megatron_dynbatch.on_batch_needed(make_rollouts)
    train_gpt(forward_step, add_arguments)


if __name__ == "__main__":
    main()
