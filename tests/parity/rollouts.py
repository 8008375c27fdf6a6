"""The rollouts that the parity suite trains on, made to be hard to get right by accident.

Uneven steps; fan-out, so that no step but one of a single sample has as many samples as rollouts;
neighbours of equal lengths; samples without a prompt, which carry every column all the same;
advantages of both signs within a response; masks with holes, some of them where context
parallelism cuts.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from megatron_dynbatch.rollouts import RolloutDirectory, Sample

STEP_SIZES = (8, 5, 12, 3, 9, 8)
"""Rollouts of each step; 45 in all."""

SHORT_SIZES = (8, 1, 12)
"""Fewer steps, one of them with a single sample."""

CAPACITY = 64
"""Tokens that a micro-batch holds at most, per GPU; every sample fits."""

_SHORTEST, _LONGEST = 4, 40


@dataclass(frozen=True)
class Example:
    """One training sequence as the reference sees it.

    Attributes:
        tokens: T token ids.
        mask: R entries 0/1 for the last R tokens; the first is 0 if R = T.
        rollout: Which rollout emitted it, unique over all steps.
        group: Prompt group of that rollout.
        advantages: R, of both signs; for every fourth rollout R times the same.
        log_probs: R log-probabilities under the old policy; float32 holds them exactly, as it
            does the advantages.
        ref_log_probs: R, under the reference policy.
    """

    tokens: tuple[int, ...]
    mask: tuple[int, ...]
    rollout: int
    group: int
    advantages: tuple[float, ...]
    log_probs: tuple[float, ...]
    ref_log_probs: tuple[float, ...]


def make_steps(
    sizes: Sequence[int] = STEP_SIZES, *, vocab: int = 128, seed: int = 0, trained: float = 0.8
) -> list[list[Example]]:
    """Rollouts of 1 to 4 samples each; lengths differ within a step, but for twins.

    In every step the second rollout is trained nowhere, and one sample of a larger rollout has an
    empty mask too. The first two samples of each rollout of three or more are twins, of the same
    lengths; the third one has no prompt. Two rollouts make a prompt group. `trained` is the share
    of a response's tokens that are trained, the last one always.
    """
    draw = random.Random(seed)
    steps, rollout = [], 0
    for size in sizes:
        fan_outs = [1 + (rollout + k) % 4 for k in range(size)]
        lengths = draw.sample(range(_SHORTEST, _LONGEST + 1), sum(fan_outs))
        step = []
        for k, fan_out in enumerate(fan_outs):
            for j in range(fan_out):
                empty = k == 1 or (fan_out == 4 and j == 2)
                length = lengths.pop()
                response = draw.randint(1, length - 1)
                if fan_out >= 3 and j == 1:
                    length, response = len(step[-1].tokens), len(step[-1].mask)
                elif fan_out >= 3 and j == 2:
                    response = length
                share = 0.0 if empty else trained
                step.append(_example(draw, length, response, rollout + k, vocab, share))
        steps.append(step)
        rollout += size
    return steps


def _example(
    draw: random.Random, length: int, response: int, rollout: int, vocab: int, trained: float
) -> Example:
    mask = [int(trained > 0 and draw.random() < trained) for _ in range(response)]
    # Two ranks of context parallelism cut into quarters, and the token behind a cut is predicted
    # before it: holes on one side or the other.
    for cut in (-(-length // 4), -(-length // 4) * 2):
        entry = cut + draw.randint(0, 1) - (length - response)
        if 0 <= entry < response:
            mask[entry] = 0
    if trained:
        mask[-1] = 1
    if response == length:
        mask[0] = 0  # nothing predicts it
    # The last id is Megatron's end of document; keep clear of it.
    tokens = [draw.randrange(vocab - 1) for _ in range(length)]
    old, ref = (
        tuple(draw.randint(-448, -192) / 64 for _ in range(response)) for _ in ("old", "ref")
    )
    drawn = [draw.choice([-1, 1]) * draw.randint(16, 128) / 64 for _ in range(response)]
    advantages = tuple(drawn) if rollout % 4 else (drawn[0],) * response
    return Example(tuple(tokens), tuple(mask), rollout, rollout // 2, advantages, old, ref)


def write_batches(path: Path, batches: Sequence[Sequence[Example]], *, finish: bool = True) -> None:
    """One rollout batch for each list of examples, then the END marker."""
    directory = RolloutDirectory(path)
    for batch in batches:
        directory.write([to_sample(example) for example in batch])
    if finish:
        directory.finish()


def to_sample(example: Example) -> Sample:
    """The same sequence in the package's contract."""
    return Sample(
        tokens=example.tokens,
        loss_mask=example.mask,
        rollout_id=example.rollout,
        group_id=example.group,
        # A rollout's own advantage is one number where it is the same everywhere.
        advantage=example.advantages
        if len(set(example.advantages)) != 1
        else example.advantages[0],
        log_probs=example.log_probs,
        ref_log_probs=example.ref_log_probs,
    )


def batch_flags(path: Path, sizes: Sequence[int] = STEP_SIZES) -> dict[str, object]:
    """The plugin's options when each batch of the directory is one step."""
    return {
        "dynamic-global-batch": True,
        "rollout-path": path,
        "rollouts-per-step": "batch",
        "max-tokens-per-gpu": CAPACITY,
        "train-samples": sum(sizes),
    }
