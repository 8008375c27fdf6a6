"""Which runs `verify` makes, and their command lines."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from megatron_dynbatch.cli.verify_cells import Cell
from megatron_dynbatch.geometry import padded_micro_batch
from megatron_dynbatch.plan import ParallelLayout, padded_length
from megatron_dynbatch.rollouts import Sample

# Stand before the script's own arguments, which win.
TINY_MODEL = (
    "--num-layers 2 --hidden-size 32 --num-attention-heads 4 --ffn-hidden-size 64 "
    "--normalization RMSNorm --position-embedding-type rope --swiglu --disable-bias-linear "
    "--untie-embeddings-and-output-weights --attention-dropout 0 --hidden-dropout 0 "
    "--tokenizer-type NullTokenizer --vocab-size 127 --make-vocab-size-divisible-by 16 --lr 1e-3"
).split()

# What verify decides itself, and what would make runs differ, stop early or write files.
_TAKEN_AWAY = re.compile(
    r"--(context-parallel-size|max-tokens-per-gpu|rollout-path|rollouts-per-step|leftover|"
    r"oversize|train-iters|train-samples|exit-.*|global-batch-size|micro-batch-size|rampup-.*|"
    r"seq-length|max-position-embeddings|save.*|load|eval-.*|full-validation|log-interval|"
    r"lr-decay-(iters|samples)|lr-warmup-.*|lr-wsd-decay-.*|tensorboard-.*|wandb-.*|step-report|"
    r"use-distributed-optimizer|overlap-(grad-reduce|param-gather)|bf16|fp16|fp8-.*|"
    r"(data|train-data|valid-data|test-data)-path|mock-data|dynamic-global-batch)(=.*)?"
)


def plan_cells(batches: Sequence[Sequence[Sample]], own: Sequence[str] = ()) -> list[Cell]:
    """The cells for these rollouts: the first holds every sample of a step in one micro-batch.

    Args:
        batches: Rollouts of each step.
        own: The script's arguments, for the tensor parallelism that a cap must fit.
    """
    lengths = [np.array([s.total_length for s in batch]) for batch in batches]

    def cell(name: str, kinds: str, dp: int, cp: int, size: str) -> Cell:
        layout = ParallelLayout(
            dp=dp, cp=cp, tp=size_of(own, "tensor"), sequence_parallel="--sequence-parallel" in own
        )
        padded = [padded_length(of_batch, layout) for of_batch in lengths]
        longest, tokens = max(int(p.max()) for p in padded), max(int(p.sum()) for p in padded)
        # Samples without a trained token, or every rollout again, must fit into one micro-batch.
        capacity = {"all": 2 * tokens, "half": max(longest, -(-tokens // 2)), "one": longest}
        width = padded_micro_batch(capacity[size], layout)
        return Cell(name, frozenset(kinds.split()), dp, cp, width // cp)

    return [
        cell("one micro-batch", "", 1, 1, "all"),
        cell("many micro-batches", "packing", 1, 1, "one"),
        cell("few micro-batches", "packing", 1, 1, "half"),
        cell("DP2", "dp", 2, 1, "all"),
        cell("DP2, many", "packing dp", 2, 1, "one"),
        cell("CP2", "cp", 1, 2, "all"),
        cell("CP2, many", "packing cp", 1, 2, "one"),
        cell("DP2 x CP2, many", "packing dp cp", 2, 2, "one"),
        cell("masked samples", "masked", 1, 1, "all"),
        cell("rollouts twice", "twice", 1, 1, "all"),
    ]


def script_arguments(arguments: Sequence[str]) -> list[str]:
    """The user's arguments without those that verify decides."""
    kept: list[str] = []
    taken = False
    for argument in arguments:
        if argument.startswith("--"):
            taken = _TAKEN_AWAY.fullmatch(argument) is not None
        if not taken:
            kept.append(argument)
    return kept


def cell_arguments(
    cell: Cell, rollouts: Path, batches: Sequence[Sequence[Sample]]
) -> list[str]:
    """What verify adds to the command line for a cell."""
    total = sum(_num_rollouts(batch) for batch in batches)
    values = {
        "rollout-path": rollouts,
        "rollouts-per-step": "batch",
        "max-tokens-per-gpu": cell.max_tokens_per_gpu,
        "context-parallel-size": cell.cp,
        "train-samples": total,
        # Learned position embeddings must have the same size in every cell.
        "max-position-embeddings": 1 << 14,
        "eval-iters": 0,
        "eval-interval": 1000,
        "log-interval": 1,
    }
    flags = [word for name, value in values.items() for word in (f"--{name}", str(value))]
    return ["--dynamic-global-batch", *flags]


def _num_rollouts(batch: Sequence[Sample]) -> int:
    ids = [s.rollout_id for s in batch]
    return len({i for i in ids if i is not None}) + ids.count(None)


def _value_of(arguments: Sequence[str], name: str) -> str | None:
    value = None
    for place, argument in enumerate(arguments):
        flag, _, attached = argument.partition("=")
        if flag == name:
            value = attached or arguments[place + 1]
    return value


def size_of(arguments: Sequence[str], kind: str) -> int:
    """Size of "tensor" or "pipeline" model parallelism that the arguments ask for."""
    return int(_value_of(arguments, f"--{kind}-model-parallel-size") or 1)


def counts_empty_samples(arguments: Sequence[str]) -> bool:
    """Whether samples without a trained token count in B, so that more of them change the loss."""
    by_sample = _value_of(arguments, "--loss-reduction") == "sample"
    return by_sample and _value_of(arguments, "--empty-rollouts") != "skip"
