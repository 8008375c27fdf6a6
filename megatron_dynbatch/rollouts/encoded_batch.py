"""A batch as Parquet files in memory: what Ray keeps in its object store."""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from megatron_dynbatch.rollouts.errors import RolloutDataError
from megatron_dynbatch.rollouts.parquet_file import Blob
from megatron_dynbatch.rollouts.parquet_index import Places, read_index, read_places
from megatron_dynbatch.rollouts.parquet_read import read_part
from megatron_dynbatch.rollouts.parquet_rows import PartCells
from megatron_dynbatch.rollouts.parquet_write import Parts, write_index, write_part
from megatron_dynbatch.rollouts.sample import Sample


class EncodedBatch(NamedTuple):
    """A batch as Parquet files in memory.

    Attributes:
        index: Of all rows.
        parts: For each part its tokens, masks and ids, and its optional fields (None: it has none).
        plan_json: The rollout side's plan, if any.
    """

    index: Any
    parts: list[tuple[Any, Any | None]]
    plan_json: str | None


class Located(NamedTuple):
    """A part that a rank fetches.

    Attributes:
        positions: Row of the batch → position in the part.
        refs: Of its two objects, see `EncodedBatch`.
        cells: Sizes of its cells.
    """

    positions: dict[int, int]
    refs: tuple[Any, Any | None]
    cells: PartCells


def encode_batch(
    samples: Sequence[Sample], plan_json: str | None, parts: Sequence[Sequence[int]] | None
) -> EncodedBatch:
    """Encodes validated samples.

    Raises:
        ValueError: Parts that are none of these samples.
    """
    division = Parts.of(len(samples), parts)
    encoded = [encode_part([samples[row] for row in rows], rows) for rows in division.rows]
    sink = io.BytesIO()
    write_index(sink, samples, division.places)
    return EncodedBatch(_array(sink), encoded, plan_json)


def encode_part(samples: Sequence[Sample], rows: Sequence[int]) -> tuple[Any, Any | None]:
    """Tokens, masks and ids of some rows of a batch, and their optional fields if they have any."""
    halves = []
    for required in (True, False):
        sink = io.BytesIO()
        write_part(sink, samples, rows, required=required, optional=not required)
        halves.append(_array(sink))
    return halves[0], halves[1] if halves[1].size else None


def part_of(batch: EncodedBatch, part: int, places: Places) -> tuple[Any, Any | None]:
    """A part that the index of a batch names.

    Raises:
        RolloutDataError: There is no such part.
    """
    if not 0 <= part < len(batch.parts):
        raise RolloutDataError(
            f"{places.source}: the index names part {part} of {len(batch.parts)}; the batch is "
            "damaged: write it again"
        )
    return batch.parts[part]


def decode_batch(name: str, batch: EncodedBatch) -> tuple[list[Sample], list[list[int]]]:
    """Samples in row order, and the rows of each part in storage order.

    Raises:
        RolloutDataError: The batch is damaged.
    """
    index = Blob(name, batch.index)
    samples: dict[int, Sample] = {}
    parts: list[list[int]] = []
    places = read_places(index)
    by_part = places.by_part(range(len(read_index(index))))
    for part, positions in sorted(by_part.items()):
        contents = part_of(batch, part, places)
        blobs = [Blob(name, content) for content in contents if content is not None]
        samples |= read_part(blobs, positions, places.cells(part))
        parts.append(sorted(positions, key=positions.__getitem__))
    return [samples[row] for row in sorted(samples)], parts


def _array(sink: io.BytesIO) -> np.ndarray:
    # An array lies in the object store as it is; readers map it without a copy.
    return np.frombuffer(sink.getvalue(), np.uint8)
