"""Where ``megatron-dynbatch plan`` gets lengths from."""

from __future__ import annotations

import argparse
import json
import re
from pathlib import Path
from typing import Any

import numpy as np

from megatron_dynbatch.errors import OptionError
from megatron_dynbatch.plan import PlanError
from megatron_dynbatch.plan.distributions import draw_lengths, draw_rollout_ids
from megatron_dynbatch.rollouts import RolloutDataError, RolloutDirectory, SampleIndex
from megatron_dynbatch.rollouts.kept import first_kept

_BATCH = re.compile(r"batch-(\d+)$")
# Columns of a file of lengths; the first of each that is there counts.
COLUMNS = {
    "total_lengths": ("total_length", "length"),
    "response_lengths": ("response_length",),
    "mask_sums": ("mask_sum",),
    "rollout_ids": ("rollout_id",),
    "group_ids": ("group_id",),
}


def read_index(args: argparse.Namespace) -> SampleIndex:
    """The batch that the arguments name.

    Raises:
        ValueError: The directory, the file or the distribution cannot be used; says why.
    """
    if args.rollouts is not None:
        return _read_batch(RolloutDirectory(args.rollouts), args.batch)
    if args.lengths is not None:
        return _read_file(args.lengths)
    lengths = draw_lengths(args.distribution, args.num_samples, args.seed)
    absent = np.full(lengths.size, -1, dtype=np.int64)
    rollout_ids = draw_rollout_ids(lengths.size, args.seed) if args.agentic else absent
    return SampleIndex(lengths, lengths, lengths, rollout_ids, absent)


def _read_batch(directory: RolloutDirectory, batch: int | None) -> SampleIndex:
    """A batch that is there, the first that is kept by default; waits for none."""
    path = directory.path
    if not path.is_dir():
        what = "is a file" if path.exists() else "there is no such directory"
        raise OptionError(f"--rollouts {path}: {what}; give one that rollouts were written to")
    if batch is None:
        batch = first_kept(directory)
    if batch < 0:
        raise OptionError(f"--batch {batch}: batches are numbered from 0")
    state = directory.state(batch)
    if state == "present":
        return directory.index(batch)
    numbers = sorted(int(found[1]) for name in path.iterdir() if (found := _BATCH.match(name.name)))
    held = [number for number in numbers if _is_present(directory, number)]
    there = "no batch"
    if held:
        there = f"batch {held[0]}" if len(held) == 1 else f"batches {held[0]} to {held[-1]}"
    ending = "and was closed after them" if state == "end" else "so far"
    raise OptionError(f"--batch {batch}: {path} has {there} {ending}")


def _is_present(directory: RolloutDirectory, batch: int) -> bool:
    try:
        return directory.state(batch) == "present"
    except RolloutDataError:  # it was deleted after it had been trained
        return False


def _read_file(path: Path) -> SampleIndex:
    """A Parquet or JSONL file with a row per sample; `length` is the only column it needs."""
    if not path.is_file():
        what = "is a directory" if path.is_dir() else "no such file"
        raise OptionError(f"--lengths {path}: {what}")
    rows = _read_parquet(path) if path.suffix == ".parquet" else _read_jsonl(path)
    if not rows:
        raise PlanError(f"{path}: holds no lengths")
    lengths = _column(rows, "total_lengths", path, None)
    absent = np.full(lengths.size, -1, dtype=np.int64)
    responses = _column(rows, "response_lengths", path, lengths)
    return SampleIndex(
        total_lengths=lengths,
        response_lengths=responses,
        mask_sums=_column(rows, "mask_sums", path, responses),
        rollout_ids=_column(rows, "rollout_ids", path, absent),
        group_ids=_column(rows, "group_ids", path, absent),
    )


def _read_jsonl(path: Path) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except ValueError as error:
            raise PlanError(f"{path}, line {number}: not JSON ({error})") from error
        # A bare number is a length.
        rows.append(row if isinstance(row, dict) else {"length": row})
    return rows


def _read_parquet(path: Path) -> list[dict[str, Any]]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        rows: list[dict[str, Any]] = pq.read_table(path).to_pylist()
    except pa.ArrowInvalid as error:
        raise PlanError(f"{path}: not a Parquet file ({error})") from error
    return rows


def _column(
    rows: list[dict[str, Any]], field: str, path: Path, default: np.ndarray | None
) -> np.ndarray:
    names = COLUMNS[field]
    values: list[int] = []
    for number, row in enumerate(rows):
        value = next((row[name] for name in names if row.get(name) is not None), None)
        if value is None and default is not None:
            value = int(default[number])
        if isinstance(value, bool) or not isinstance(value, int):
            raise PlanError(
                f"{path}, row {number}: {' or '.join(names)} must be an integer, is {value!r}"
            )
        values.append(value)
    return np.array(values, dtype=np.int64)
