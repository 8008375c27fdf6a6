"""Which runs `verify` makes, and their command lines."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from megatron_dynbatch.cli.verify_cells import Cell
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


def plan_cells(batches: Sequence[Sequence[Sample]]) -> list[Cell]:
    """The cells for these rollouts: the first holds every sample of a step in one micro-batch."""
    longest = max(s.total_length for batch in batches for s in batch)
    tokens = max(sum(-(-s.total_length // 4) * 4 for s in batch) for batch in batches)
    small, large = _round_up(longest), _round_up(2 * tokens)
    half = _round_up(tokens // 2 + longest)
    return [
        Cell("one micro-batch", "reference", 1, 1, large),
        Cell("many micro-batches", "packing", 1, 1, small),
        Cell("few micro-batches", "packing", 1, 1, half),
        Cell("DP2", "dp", 2, 1, large),
        Cell("DP2, many", "dp", 2, 1, small),
        Cell("CP2", "cp", 1, 2, large // 2),
        Cell("DP2 x CP2, many", "cp", 2, 2, _round_up(small, 32) // 2),
        Cell("masked samples", "masked", 1, 1, large),
        Cell("rollouts twice", "twice", 1, 1, large),
    ]


def _round_up(tokens: int, multiple: int = 32) -> int:
    return -(-tokens // multiple) * multiple


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
