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
from megatron_dynbatch.reduce.ragged import Int64, starts_of
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
    _check_masks(batch, rows, denoms)
    total = np.array([s.total_length for s in batch], dtype=np.int64)
    response = np.array([s.response_length for s in batch], dtype=np.int64)
    padded = padded_length(total, layout)
    tail = _tail(int(padded.sum()), width, layout)
    laid_out = np.concatenate([padded, tail])
    cu_seqlens_padded = _cumulative(laid_out)
    size = int(cu_seqlens_padded[-1])
    tail_size = int(tail.sum())
    whole = _Strips(np.zeros_like(total), total, padded, tail_size)
    # The entry of a first token without a prompt has no place: nothing predicts it.
    unpredicted = (response == total) & (total > 0)
    heads = np.maximum(total - response - 1, 0)
    held = _Strips(heads, response - unpredicted, padded, tail_size)
    firsts = unpredicted.astype(np.int64).tolist()

    tokens = whole.joined([s.tokens for s in batch], np.int64)
    mask = held.joined([s.loss_mask[f:] for s, f in zip(batch, firsts, strict=True)], np.float32)
    factors = np.divide(1.0, denoms, out=np.zeros(len(batch)), where=np.asarray(denoms) > 0)
    names = _column_names(batch) if columns is None else list(columns)
    return PackedSequence(
        tokens=tokens,
        labels=_labels(tokens, cu_seqlens_padded, total),
        position_ids=np.arange(size) - np.repeat(starts_of(laid_out), laid_out),
        loss_mask=mask,
        padding_mask=~whole.filled(np.ones(len(batch), dtype=np.bool_)),
        token_weights=mask * held.filled(factors),
        cu_seqlens=_cumulative(np.concatenate([total, np.zeros_like(tail)])),
        cu_seqlens_padded=cu_seqlens_padded,
        max_seqlen=int(laid_out.max()),
        columns={name: _column(batch, rows, name, held, firsts) for name in names},
        sample_rows=tuple(rows),
        sample_denoms=np.asarray(denoms, dtype=np.float64),
        total_lengths=total,
        response_lengths=response,
    )


class _Strips:
    """Where each sample's values lie: `lengths` of them after `heads` blanks in `padded` tokens.

    Arrays are joined and repeated, not indexed: an index for every token costs ten times as much.

    Args:
        heads: int64 [B].
        lengths: int64 [B].
        padded: int64 [B] laid-out lengths.
        tail_size: Blanks after the last sample.
    """

    def __init__(self, heads: Int64, lengths: Int64, padded: Int64, tail_size: int) -> None:
        self.lengths = lengths
        # Blank, values, blank, values, …, blank: the rest of a sample joins the next one's head.
        self.blanks = np.zeros(len(heads) + 1, dtype=np.int64)
        self.blanks[:-1] += heads
        self.blanks[1:] += padded - heads - lengths
        self.blanks[-1] += tail_size
        self.size = int(self.blanks.sum() + lengths.sum())

    def joined(self, parts: Sequence[NDArray], dtype: type) -> NDArray:
        """`parts[i]`, as long as `lengths[i]`, at the place of sample i, 0 elsewhere; [S]."""
        blanks = self.blanks.tolist()
        zeros: NDArray = np.zeros(max(blanks), dtype=dtype)
        pieces: list[NDArray] = [zeros[: blanks[0]]]
        for part, blank in zip(parts, blanks[1:], strict=True):
            pieces += (part, zeros[:blank])
        result: NDArray = np.empty(self.size, dtype=dtype)
        np.concatenate(pieces, out=result, casting="unsafe")
        return result

    def filled(self, values: NDArray) -> NDArray:
        """`values[i]` at every place of sample i, 0 elsewhere; [S]."""
        counts = np.empty(2 * len(values) + 1, dtype=np.int64)
        counts[0::2], counts[1::2] = self.blanks, self.lengths
        shown = np.zeros(len(counts), dtype=values.dtype)
        shown[1::2] = values
        return np.repeat(shown, counts)


def _labels(tokens: Int64, cu_seqlens_padded: NDArray[np.int32], total: Int64) -> Int64:
    """The next token of the same sample, 0 where there is none; int64 [S]."""
    labels = np.empty_like(tokens)
    labels[:-1] = tokens[1:]
    labels[cu_seqlens_padded[1:] - 1] = 0
    labels[cu_seqlens_padded[: len(total)] + total - 1] = 0
    return labels


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


def _check_masks(
    batch: Sequence[Sample], rows: Sequence[int], denoms: NDArray[np.int64] | NDArray[np.float64]
) -> None:
    for row, sample, denom in zip(rows, batch, denoms.tolist(), strict=True):
        mask = sample.loss_mask
        if len(mask) == len(sample.tokens) and mask[:1].any():
            raise ValueError(
                f"row {row} has no prompt, so nothing predicts its first token: its first mask "
                "entry must be 0"
            )
        if denom <= 0 and mask.any():
            raise ValueError(
                f"row {row} has trained tokens but its denominator is {denom}; plan it in a step"
            )


def _column_names(batch: Sequence[Sample]) -> list[str]:
    if not batch:
        return list(COLUMN_FIELDS)
    return [
        name
        for name, field in COLUMN_FIELDS.items()
        if any(getattr(sample, field) is not None for sample in batch)
    ]


def _column(
    batch: Sequence[Sample], rows: Sequence[int], name: str, held: _Strips, firsts: Sequence[int]
) -> NDArray[np.float32]:
    """A column of the full sequence, float32 [S]."""
    if name not in COLUMN_FIELDS:
        raise ValueError(f"unknown column {name!r}; there are {', '.join(COLUMN_FIELDS)}")
    values = [getattr(sample, COLUMN_FIELDS[name]) for sample in batch]
    for row, sample, value in zip(rows, batch, values, strict=True):
        if value is None:
            raise ValueError(
                f"row {row} (rollout {sample.rollout_id}) has no {COLUMN_FIELDS[name]}; give it "
                "for every sample of the batch or for none"
            )
    if not any(isinstance(value, np.ndarray) for value in values):
        return held.filled(np.array(values, dtype=np.float32))
    parts = [
        # A scalar advantage holds for every token of its response.
        value[first:] if isinstance(value, np.ndarray) else np.full(length, value, np.float32)
        for value, first, length in zip(values, firsts, held.lengths.tolist(), strict=True)
    ]
    return held.joined(parts, np.float32)


def _cumulative(lengths: Int64) -> NDArray[np.int32]:
    result = np.zeros(len(lengths) + 1, dtype=np.int32)
    np.cumsum(lengths, out=result[1:])
    return result
