"""Checks that the samples of a batch make sense, naming the row and the field of each fault.

Invariant (asserted by the tests): values at masked positions are never looked at, so NaN and
infinities there are no faults.
"""

from collections.abc import Iterator, Sequence
from itertools import islice

import numpy as np
from numpy.typing import NDArray

from megatron_dynbatch.rollouts.errors import RolloutDataError
from megatron_dynbatch.rollouts.sample import PER_TOKEN_FIELDS, Sample

MAX_TOKEN_ID = 2**31 - 1
"""Token ids are stored in 32 bits."""

_LARGEST = float(np.finfo(np.float32).max)


def validate_samples(
    samples: Sequence[Sample],
    *,
    vocab_size: int | None = None,
    rows: Sequence[int] | None = None,
    where: str = "samples",
    row_word: str = "row",
    limit: int = 20,
) -> None:
    """Checks samples that are to be trained on together.

    Args:
        samples: The samples of one batch, or some of its rows.
        vocab_size: Token ids must be below it; None: only below 2**31.
        rows: The number of each sample in messages; None: 0, 1, 2…
        where: Named at the start of the error, a file for example.
        row_word: What a row is called in messages ("line" for JSON lines).
        limit: Faults named in one error; looking stops there.

    Raises:
        RolloutDataError: No samples; or, in named rows and fields: no tokens, a response longer
            than the tokens, mask entries other than 0 and 1, a trained first token without a
            prompt, token ids outside the vocabulary, per-token fields of another length than the
            response, values that are not finite where trained, negative ids, mixed group ids
            inside a rollout, or a field that only some of the trained samples have.
    """
    if len(samples) == 0:
        raise RolloutDataError(f"{where}: no rollouts; give at least one sample")
    if not all(isinstance(sample, Sample) for sample in samples):
        row = next(n for n, sample in enumerate(samples) if not isinstance(sample, Sample))
        raise RolloutDataError(
            f"{where}: {row_word} {row} is a {type(samples[row]).__name__}; give samples, "
            "Sample(**fields) from a dict"
        )
    numbers = range(len(samples)) if rows is None else rows
    labels = [_label(row_word, n, sample) for n, sample in zip(numbers, samples, strict=True)]
    faults = list(islice(_faults(samples, labels, vocab_size), limit + 1))
    if not faults:
        return
    listed = faults[:limit]
    head = f"{where}: " if len(faults) == 1 else f"{where}:\n  "
    tail = f"\n  … only the first {limit} faults are listed" if len(faults) > limit else ""
    raise RolloutDataError(head + "\n  ".join(listed) + tail, listed)


def _label(row_word: str, number: int, sample: Sample) -> str:
    rollout = "" if sample.rollout_id is None else f" (rollout {sample.rollout_id})"
    return f"{row_word} {number}{rollout}"


def _faults(
    samples: Sequence[Sample], labels: Sequence[str], vocab_size: int | None
) -> Iterator[str]:
    for sample, label in zip(samples, labels, strict=True):
        for fault in _sample_faults(sample, vocab_size):
            yield f"{label}, {fault}"
    yield from _mixed_groups(samples, labels)
    yield from _partly_given(samples, labels)
    yield from _unlike_extras(samples, labels)


def _sample_faults(sample: Sample, vocab_size: int | None) -> Iterator[str]:
    if sample.total_length == 0:
        yield "tokens: there are none; leave the sample out"
        return
    yield from _token_faults(sample.tokens, vocab_size)
    yield from _mask_faults(sample)
    for name in ("rollout_id", "group_id", "policy_version"):
        number = getattr(sample, name)
        if number is not None and number < 0:
            yield f"{name}: {number} is negative; use None or −1 for an absent one"
    trained = sample.loss_mask != 0
    is_trained = bool(trained.any())
    for name in ("reward", "advantage"):
        value = getattr(sample, name)
        if isinstance(value, float) and is_trained and not abs(value) <= _LARGEST:
            yield f"{name}: {value} is not finite as float32"
    for name in ("advantage", *PER_TOKEN_FIELDS):
        value = getattr(sample, name)
        if isinstance(value, np.ndarray):
            yield from _per_token_faults(name, value, trained)
    for kind, length in (
        ("token_arrays", sample.total_length),
        ("response_arrays", sample.response_length),
    ):
        for name, array in getattr(sample, kind).items():
            if len(array) != length:
                yield f"{kind}[{name!r}]: {len(array)} entries for {length} tokens; give one each"


def _token_faults(tokens: NDArray[np.int64], vocab_size: int | None) -> Iterator[str]:
    size = MAX_TOKEN_ID + 1 if vocab_size is None else vocab_size
    if tokens.min() >= 0 and tokens.max() < size:
        return
    position = int(np.flatnonzero((tokens < 0) | (tokens >= size))[0])
    token = tokens[position]
    problem = "is negative" if token < 0 else f"is not below the vocabulary size {size}"
    yield f"tokens: id {token} at position {position} {problem}; tokenize with the model's own"


def _mask_faults(sample: Sample) -> Iterator[str]:
    mask = sample.loss_mask
    if len(mask) > sample.total_length:
        yield (
            f"loss_mask: response and mask have {len(mask)} tokens, the whole sample only "
            f"{sample.total_length}; the mask covers the response, a part of the tokens"
        )
    wrong = np.flatnonzero(mask > 1)
    if wrong.size:
        yield f"loss_mask: entry {wrong[0]} is {mask[wrong[0]]}; it must be 0 or 1"
    if len(mask) == sample.total_length and mask[0] != 0:
        yield (
            "loss_mask: entry 0 is 1 but there is no prompt, and nothing predicts a first token; "
            "set it to 0 or add a prompt token"
        )


def _per_token_faults(
    name: str, values: NDArray[np.float32], trained: NDArray[np.bool_]
) -> Iterator[str]:
    if len(values) != len(trained):
        yield (
            f"{name}: {len(values)} values for a response of {len(trained)} tokens; "
            "give one per response token"
        )
        return
    usable = np.isfinite(values)
    if usable.all():
        return
    if name == "ref_log_probs":  # a reference that forbids the token: an infinite KL, reported
        usable |= np.isneginf(values)
    wrong = np.flatnonzero(trained & ~usable)
    if wrong.size:
        yield f"{name}: entry {wrong[0]} is {values[wrong[0]]} at a trained position"


def _mixed_groups(samples: Sequence[Sample], labels: Sequence[str]) -> Iterator[str]:
    first_row: dict[int, int] = {}
    for row, sample in enumerate(samples):
        if sample.rollout_id is None:
            continue
        first = first_row.setdefault(sample.rollout_id, row)
        if sample.group_id != samples[first].group_id:
            yield (
                f"{labels[row]}, group_id: {sample.group_id}, but {labels[first]} of the same "
                f"rollout has {samples[first].group_id}; a rollout belongs to one prompt group"
            )


def _partly_given(samples: Sequence[Sample], labels: Sequence[str]) -> Iterator[str]:
    trained = [row for row, sample in enumerate(samples) if sample.mask_sum > 0]
    for name in ("advantage", *PER_TOKEN_FIELDS):
        missing = [row for row in trained if getattr(samples[row], name) is None]
        if missing and len(missing) < len(trained):
            yield (
                f"{labels[missing[0]]}, {name}: absent, as in {len(missing)} of {len(trained)} "
                "samples with trained tokens; give it for all of them or for none"
            )


def _unlike_extras(samples: Sequence[Sample], labels: Sequence[str]) -> Iterator[str]:
    """Arrays for the user's code have one dtype and one shape per token in a batch."""
    for kind in ("token_arrays", "response_arrays"):
        first: dict[str, int] = {}
        for row, sample in enumerate(samples):
            for name, array in getattr(sample, kind).items():
                other = getattr(samples[first.setdefault(name, row)], kind)[name]
                if (array.dtype, array.shape[1:]) != (other.dtype, other.shape[1:]):
                    yield (
                        f"{labels[row]}, {kind}[{name!r}]: {array.dtype} {list(array.shape[1:])} "
                        f"per token, but {labels[first[name]]} has {other.dtype} "
                        f"{list(other.shape[1:])}; give the same for all samples"
                    )
        for name in first:
            missing = [row for row, s in enumerate(samples) if name not in getattr(s, kind)]
            if missing:
                yield (
                    f"{labels[missing[0]]}, {kind}[{name!r}]: absent, as in {len(missing)} of "
                    f"{len(samples)} samples; give it for all of them or for none"
                )
