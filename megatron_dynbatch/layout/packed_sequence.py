"""A micro-batch packed as one THD sequence, on the host, before context parallelism slices it.

Invariants (asserted by the tests): samples stand in the plan's order, each padded to
`padded_length`; the tail is made of sequences of its own of at most 128 tokens, so attention cost
and FLOP counts stay honest; every sequence is a multiple of what context parallelism needs.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from megatron_dynbatch.plan.layout import ParallelLayout, padded_length, padded_micro_batch
from megatron_dynbatch.reduce.ragged import Int64, ragged_arange, starts_of
from megatron_dynbatch.reduce.segment_table import segment_table
from megatron_dynbatch.rollouts.sample import PER_TOKEN_FIELDS, Sample

MAX_TAIL_SEQUENCE = 128

# Column of a micro-batch → field of a sample.
COLUMN_FIELDS = {"advantages": "advantage", **{name: name for name in PER_TOKEN_FIELDS}}


@dataclass(frozen=True, eq=False)
class PackedSequence:
    """One micro-batch of B samples as a full sequence of S tokens, in NumPy.

    The entry at position p of labels, loss_mask, token_weights and columns belongs to the
    prediction of token p+1.

    Attributes:
        tokens: int64 [S]; 0 at padding.
        labels: int64 [S], the next token; 0 at a sample's last token and at padding.
        position_ids: int64 [S], 0 … from the start of each sequence.
        loss_mask: float32 [S], 0 or 1.
        padding_mask: bool [S], True at padding.
        token_weights: float64 [S], mask ÷ denominator of the sample.
        cu_seqlens: int32 [n+1], cumulative lengths without padding (a tail sequence has length 0).
        cu_seqlens_padded: int32 [n+1], cumulative lengths as laid out; the last is S.
        max_seqlen: Longest laid-out sequence, in tokens of the full sequence.
        columns: name → float32 [S]; 0 outside responses.
        sample_rows: Plan rows of the samples, [B].
        sample_denoms: float64 [B], denominator of each sample.
        total_lengths: int64 [B], tokens of each sample.
        response_lengths: int64 [B], response tokens of each sample.
    """

    tokens: Int64
    labels: Int64
    position_ids: Int64
    loss_mask: NDArray[np.float32]
    padding_mask: NDArray[np.bool_]
    token_weights: NDArray[np.float64]
    cu_seqlens: NDArray[np.int32]
    cu_seqlens_padded: NDArray[np.int32]
    max_seqlen: int
    columns: dict[str, NDArray[np.float32]]
    sample_rows: tuple[int, ...]
    sample_denoms: NDArray[np.float64]
    total_lengths: Int64
    response_lengths: Int64


def pack_samples(
    samples: Mapping[int, Sample],
    rows: Sequence[int],
    denoms: NDArray[np.int64] | NDArray[np.float64],
    layout: ParallelLayout,
    *,
    width: int | None = None,
    columns: Collection[str] | None = None,
) -> PackedSequence:
    """Packs samples into one sequence; without rows, makes a dummy of padding tokens.

    Args:
        samples: plan row → sample; only `rows` need be there.
        rows: Plan rows in the order to pack them.
        denoms: Denominator of each row of `rows`, from the plan.
        layout: Decides the padding.
        width: Lay out at exactly this many tokens; default: the smallest length allowed.
        columns: Names of `COLUMN_FIELDS` to lay out; default: those its samples have (all of
            them, as zeros, for a dummy).

    Raises:
        ValueError: A row without sample, a field that some samples lack, a trained token that
            nothing predicts, a denominator ≤ 0 with trained tokens (each naming the row), or a
            width that is too small or no multiple of what the layout needs.
    """
    missing = [row for row in rows if row not in samples]
    if missing:
        raise ValueError(f"row {missing[0]} of the micro-batch has no sample; read rows {missing}")
    batch = [samples[row] for row in rows]
    total = np.array([s.total_length for s in batch], dtype=np.int64)
    response = np.array([s.response_length for s in batch], dtype=np.int64)
    padded = padded_length(total, layout)
    laid_out = np.concatenate([padded, _tail(int(padded.sum()), width, layout)])
    size = int(laid_out.sum())
    starts = starts_of(laid_out)
    place = segment_table(total, response, padded_lengths=padded, num_tokens=size)

    tokens = np.zeros(size, dtype=np.int64)
    held = ragged_arange(starts[: len(batch)], total)
    tokens[held] = _concatenate([s.tokens for s in batch], np.int64)
    padding_mask = np.ones(size, dtype=np.bool_)
    padding_mask[held] = False
    labels = np.zeros(size, dtype=np.int64)
    predicted = ragged_arange(starts[: len(batch)], np.maximum(total - 1, 0))
    labels[predicted] = tokens[predicted + 1]
    taken = place.sources[place.positions]
    mask = np.zeros(size, dtype=np.float32)
    mask[place.positions] = _checked_masks(batch, rows, denoms)[taken]
    per_token = np.repeat(np.asarray(denoms, dtype=np.float64), place.local_lengths)
    weights = np.zeros(size, dtype=np.float64)
    trained = mask[place.positions] != 0
    weights[place.positions[trained]] = 1.0 / per_token[trained]

    names = _column_names(batch) if columns is None else list(columns)
    laid_columns = {name: np.zeros(size, dtype=np.float32) for name in names}
    for name, column in laid_columns.items():
        column[place.positions] = _responses(batch, rows, name)[taken]
    real = np.concatenate([total, np.zeros(len(laid_out) - len(batch), dtype=np.int64)])
    return PackedSequence(
        tokens=tokens,
        labels=labels,
        position_ids=np.arange(size, dtype=np.int64) - np.repeat(starts, laid_out),
        loss_mask=mask,
        padding_mask=padding_mask,
        token_weights=weights,
        cu_seqlens=_cumulative(real),
        cu_seqlens_padded=_cumulative(laid_out),
        max_seqlen=int(laid_out.max()),
        columns=laid_columns,
        sample_rows=tuple(rows),
        sample_denoms=np.asarray(denoms, dtype=np.float64),
        total_lengths=total,
        response_lengths=response,
    )


def _tail(used: int, width: int | None, layout: ParallelLayout) -> Int64:
    """Lengths of the padding sequences that follow `used` tokens of samples."""
    multiple = layout.micro_batch_multiple
    if width is None:
        width = padded_micro_batch(max(used, 1), layout)
    elif width % multiple:
        raise ValueError(
            f"width {width} is not a multiple of {multiple} tokens, as this layout needs: choose "
            "--seq-length (max-tokens-per-gpu · cp) accordingly"
        )
    if used > width:
        raise ValueError(
            f"the micro-batch holds {used} tokens as laid out, more than its width {width}; plan "
            "with max_tokens_per_gpu = width / cp"
        )
    unit = layout.sample_multiple
    longest = max(MAX_TAIL_SEQUENCE // unit, 1) * unit
    full, rest = divmod(width - used, longest)
    return np.array([longest] * full + [rest] * (rest > 0), dtype=np.int64)


def _checked_masks(
    batch: Sequence[Sample], rows: Sequence[int], denoms: NDArray[np.int64] | NDArray[np.float64]
) -> NDArray[np.uint8]:
    for row, sample, denom in zip(rows, batch, denoms, strict=True):
        if sample.response_length == sample.total_length and sample.loss_mask[:1].any():
            raise ValueError(
                f"row {row} has no prompt, so nothing predicts its first token: its first mask "
                "entry must be 0"
            )
        if denom <= 0 and sample.loss_mask.any():
            raise ValueError(
                f"row {row} has trained tokens but its denominator is {denom}; plan it in a step"
            )
    return _concatenate([s.loss_mask for s in batch], np.uint8)


def _column_names(batch: Sequence[Sample]) -> list[str]:
    if not batch:
        return list(COLUMN_FIELDS)
    return [
        name
        for name, field in COLUMN_FIELDS.items()
        if any(getattr(sample, field) is not None for sample in batch)
    ]


def _responses(batch: Sequence[Sample], rows: Sequence[int], name: str) -> NDArray[np.float32]:
    """Values of a column for all response tokens, sample after sample, float32 [Σ R]."""
    if name not in COLUMN_FIELDS:
        raise ValueError(f"unknown column {name!r}; there are {', '.join(COLUMN_FIELDS)}")
    parts = []
    for row, sample in zip(rows, batch, strict=True):
        value = getattr(sample, COLUMN_FIELDS[name])
        if value is None:
            raise ValueError(
                f"row {row} (rollout {sample.rollout_id}) has no {COLUMN_FIELDS[name]}; give it "
                "for every sample of the batch or for none"
            )
        # A scalar advantage holds for every token of its response.
        parts.append(np.full(sample.response_length, value, dtype=np.float32))
    return _concatenate(parts, np.float32)


def _concatenate(parts: Sequence[NDArray], dtype: type) -> NDArray:
    return np.concatenate([*parts, np.zeros(0, dtype=dtype)])


def _cumulative(lengths: Int64) -> NDArray[np.int32]:
    return np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
