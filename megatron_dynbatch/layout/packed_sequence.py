"""A micro-batch packed as one THD sequence, on the host, before context parallelism slices it.

Samples stand in the plan's order; where each token lies is the `PackLayout`'s to say.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from megatron_dynbatch.geometry import PackLayout, ParallelLayout
from megatron_dynbatch.geometry.ragged import Int64
from megatron_dynbatch.rollouts.sample import PER_TOKEN_FIELDS, Sample

# Column of a micro-batch → field of a sample.
COLUMN_FIELDS = {"advantages": "advantage", **{name: name for name in PER_TOKEN_FIELDS}}


@dataclass(frozen=True, eq=False)
class PackedSequence:
    """One micro-batch of B samples as a full sequence of S tokens, in NumPy.

    The entry at position p of labels, loss_mask, token_weights and columns belongs to the
    prediction of token p+1.

    Attributes:
        pack: Where each token lies.
        tokens: int64 [S]; 0 at padding.
        labels: int64 [S], the next token; 0 at a sample's last token and at padding.
        loss_mask: float32 [S], 0 or 1.
        padding_mask: bool [S], True at padding.
        token_weights: float64 [S], mask ÷ denominator of the sample.
        columns: name → float32 [S]; 0 outside responses.
        sample_rows: Plan rows of the samples, [B].
        sample_denoms: float64 [B], denominator of each sample.
    """

    pack: PackLayout
    tokens: Int64
    labels: Int64
    loss_mask: NDArray[np.float32]
    padding_mask: NDArray[np.bool_]
    token_weights: NDArray[np.float64]
    columns: dict[str, NDArray[np.float32]]
    sample_rows: tuple[int, ...]
    sample_denoms: NDArray[np.float64]


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
    pack = PackLayout.of_samples(
        np.array([s.total_length for s in batch], dtype=np.int64),
        np.array([s.response_length for s in batch], dtype=np.int64),
        layout,
        width,
    )
    tokens = pack.tokens.joined([s.tokens for s in batch], np.int64)
    skipped = pack.num_unpredicted.tolist()
    mask = pack.responses.joined(
        [s.loss_mask[first:] for s, first in zip(batch, skipped, strict=True)], np.float32
    )
    factors = np.divide(1.0, denoms, out=np.zeros(len(batch)), where=np.asarray(denoms) > 0)
    names = _column_names(batch) if columns is None else list(columns)
    return PackedSequence(
        pack=pack,
        tokens=tokens,
        labels=pack.following(tokens),  # padding has token 0
        loss_mask=mask,
        padding_mask=~pack.tokens.filled(np.ones(len(batch), dtype=np.bool_)),
        token_weights=mask * pack.responses.filled(factors),
        columns={name: _column(batch, rows, name, pack) for name in names},
        sample_rows=tuple(rows),
        sample_denoms=np.asarray(denoms, dtype=np.float64),
    )


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
    batch: Sequence[Sample], rows: Sequence[int], name: str, pack: PackLayout
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
        return pack.responses.filled(np.array(values, dtype=np.float32))
    lengths, skipped = pack.responses.lengths.tolist(), pack.num_unpredicted.tolist()
    parts = [
        # A scalar advantage holds for every token of its response.
        value[first:] if isinstance(value, np.ndarray) else np.full(length, value, np.float32)
        for value, first, length in zip(values, skipped, lengths, strict=True)
    ]
    return pack.responses.joined(parts, np.float32)
