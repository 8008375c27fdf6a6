"""Damages rollout files in every way and reads them, in a process of its own: it must not crash.

    python -m tests.reliability.damage FIRST COUNT

reads COUNT damaged directories and JSON files, drawn from seeds FIRST, FIRST + 1… Whatever is read
must equal what was written, or raise the package's own error. Memory is limited, so that a length
in a damaged file that is believed shows as a crash.
"""

from __future__ import annotations

import json
import os
import random
import resource
import shutil
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from megatron_dynbatch.errors import DynbatchError
from megatron_dynbatch.handshake import (
    checked_plan,
    publish_layout,
    read_layout,
    write_planned,
)
from megatron_dynbatch.plan import ParallelLayout, PlanOptions
from megatron_dynbatch.rollouts import RolloutDirectory, Sample, read_jsonl
from megatron_dynbatch.rollouts.flow import (
    publish_progress,
    publish_weights,
    published_weights,
    training_batch,
)
from megatron_dynbatch.rollouts.parquet_footer import read_footer
from tests.rollouts.forging import forge, forge_bytes
from tests.rollouts.helpers import assert_same_samples, random_samples

LAYOUT = ParallelLayout(dp=2)
OPTIONS = PlanOptions(max_tokens_per_gpu=64)
NUM_SAMPLES = 9
MEMORY_BYTES = 2 << 30


def flipped(content: bytes, draw: random.Random) -> bytes:
    """Some bits turned over."""
    damaged = bytearray(content)
    for _ in range(draw.choice([1, 1, 2, 8])):
        damaged[draw.randrange(len(damaged))] ^= 1 << draw.randrange(8)
    return bytes(damaged)


def cut(content: bytes, draw: random.Random) -> bytes:
    """The end is missing."""
    return content[: draw.randrange(len(content))]


def holed(content: bytes, draw: random.Random) -> bytes:
    """Zeros where a block was never written."""
    start = draw.randrange(len(content))
    size = draw.choice([1, 16, 512])
    return (content[:start] + bytes(size) + content[start + size :])[: len(content)]


def shifted(content: bytes, draw: random.Random) -> bytes:
    """A piece is there twice, or missing."""
    start, end = sorted(draw.randrange(len(content)) for _ in range(2))
    return draw.choice([content[:end] + content[start:], content[:start] + content[end:]])


def footer_flipped(content: bytes, draw: random.Random) -> bytes:
    """Bits turned over where Parquet's lengths and offsets are, which has no checksum."""
    length = int.from_bytes(content[-8:-4], "little")
    start = max(0, len(content) - 8 - length)
    return content[:start] + flipped(content[start:], draw)


DAMAGE = (flipped, cut, holed, shifted, footer_flipped)


def retyped(path: Path, draw: random.Random) -> None:
    """The same rows with one column of another type, name or size, or missing."""
    table = pq.read_table(path)
    place = draw.randrange(table.num_columns)
    name, rows = table.column_names[place], table.num_rows
    kind = table.schema.field(place).type
    others: list[Any] = [
        None,
        pa.nulls(rows, kind),
        pa.array(["text"] * rows),
        pa.array([[[1]]] * rows),
        pa.array([{"a": 1}] * rows),
        pa.array([[(1, 2)]] * rows, pa.map_(pa.int32(), pa.int32())),
        pa.array([[1]] * rows, pa.large_list(pa.int32())),
        pa.array([b""] * rows),
        pa.array([-(2**62)] * rows),
        pa.array([draw.choice([-1, 2**31 - 1, 2**24])] * rows, pa.int32()),
        pa.array([draw.choice([2**62, 2**24, 10**12, 0, -7])] * rows),
        pa.array([1e308] * rows),
        pa.array([float("nan")] * rows),
        pa.array([[1e38, float("inf")]] * rows, pa.list_(pa.float32())),
        pa.array([[2**31 - 1] * 10_000] * rows, pa.list_(pa.int32())),
        table.column(place),
    ]
    other = draw.choice(others)
    odd = ["", "../x", "\0", "blobs/\0", "n" * 5000, "cells/", "row", "blobs/../x", "cells/tokens"]
    new_name = draw.choice(odd) if draw.random() < 0.3 else name
    changed = table.remove_column(place) if other is None else table
    if other is not None:
        changed = table.set_column(place, new_name, other)
    options = {"compression": draw.choice(["none", "none", "none", "zstd", "snappy"])}
    try:
        forge(path.parent, path.name, lambda _: changed, **options)
    except (ValueError, TypeError, KeyError, AttributeError, pa.ArrowException):
        forge(path.parent, path.name, lambda _: changed, sums=False, **options)


def footer_forged(path: Path, draw: random.Random) -> None:
    """Counts, sizes and offsets of a footer changed, with a manifest that fits."""
    content = path.read_bytes()
    start = len(content) - 8 - int.from_bytes(content[-8:-4], "little")
    footer = bytearray(content[start:-8])
    for _ in range(draw.choice([1, 1, 2, 4])):
        place, kind = draw.randrange(len(footer)), draw.randrange(4)
        if kind == 0:
            footer[place] ^= 1 << draw.randrange(8)
        elif kind == 1:  # a varint that goes on
            size = draw.choice([1, 2, 4, 8])
            footer[place : place + size] = b"\xff" * size
        elif kind == 2:  # a number with room for a huge one
            huge = [b"\x80\x80\x80\x80\x10", b"\xfe\xff\xff\xff\x0f"]
            footer[place : place + 1] = draw.choice(huge)
        else:
            end = min(len(footer), place + draw.randrange(1, 40))
            footer[place:place] = footer[place:end] * draw.choice([1, 1, 50])
    forged = content[:start] + bytes(footer) + len(footer).to_bytes(4, "little") + b"PAR1"
    forge_bytes(path.parent, path.name, forged)


def page_forged(path: Path, draw: random.Random) -> None:
    """Bits of page headers turned over; they have no checksum, and the footer fits."""
    content = bytearray(path.read_bytes())
    start = len(content) - 8 - int.from_bytes(content[-8:-4], "little")
    chunks = read_footer(bytes(content[start:-8]), start)[0].chunks
    place = draw.choice(chunks).start + draw.randrange(24)
    content[place] = draw.choice([0xFF, 0x80, 0, content[place] ^ 1 << draw.randrange(8)])
    forge_bytes(path.parent, path.name, bytes(content))


def replaced_by(path: Path, moved: Path, draw: random.Random) -> None:
    """A link, a pipe, a folder or a huge file in the place of a file, or of the batch."""
    if draw.random() < 0.2:
        path = path.parent
    path.rename(moved)
    draw.choice(
        [
            lambda: path.symlink_to(moved, target_is_directory=moved.is_dir()),
            lambda: path.symlink_to("/dev/zero"),
            lambda: path.symlink_to(path),
            lambda: os.mkfifo(path),
            lambda: path.mkdir(),
            lambda: _huge(path),
        ]
    )()


def _huge(path: Path) -> None:
    with open(path, "wb") as file:
        file.truncate(1 << 33)  # a hole: takes no disk


FORGED = (retyped, footer_forged, footer_forged, page_forged)


def damage_files(folder: Path, draw: random.Random) -> bool:
    """Damage one file of a directory; returns whether what is read must be what was written."""
    batch = folder / "batch-00000000"
    path = draw.choice([*sorted(batch.iterdir()), *sorted((folder / "notes").iterdir())])
    if draw.random() < 0.1:
        replaced_by(path, folder.with_name("outside"), draw)
        return True
    if path.suffix == ".parquet" and draw.random() < 0.6:
        forge_kind = draw.choice(FORGED)
        forge_kind(path, draw)
        return False
    path.write_bytes(draw.choice(DAMAGE)(path.read_bytes(), draw))
    return True


def read_all(folder: Path, written: list[Sample] | None, met: Counter[str]) -> None:
    """Every reader of a directory; what comes out is right, or the package's own error."""
    directory = RolloutDirectory(folder, vocab_size=1000, open_timeout=0.0)

    def attempt(action: Any) -> Any:
        try:
            value = action()
        except DynbatchError as error:
            met[type(error).__name__] += 1
            return None
        met["read"] += 1
        return value

    index = attempt(lambda: directory.index(0))
    for rows in ([0], list(range(NUM_SAMPLES))):
        samples = attempt(lambda rows=rows: directory.read(0, rows))
        if samples is not None and written is not None:
            assert_same_samples(samples, [written[row] for row in rows])
    text = attempt(lambda: directory.plan_json(0))
    if text is not None and index is not None:
        attempt(lambda: checked_plan(text, index, LAYOUT, OPTIONS))
    attempt(lambda: read_layout(directory))
    attempt(lambda: training_batch(directory))
    attempt(lambda: published_weights(directory))


def forged_plan(text: str, draw: random.Random) -> str:
    """A plan with one value changed and a fingerprint that fits."""
    import hashlib

    values = json.loads(text.partition("\n")[2])
    spot: Any = values
    while isinstance(spot, (dict, list)) and spot:
        keys = list(spot) if isinstance(spot, dict) else list(range(len(spot)))
        key = draw.choice(keys)
        if not isinstance(spot[key], (dict, list)) or not spot[key] or draw.random() < 0.2:
            spot[key] = draw.choice([None, "text", -1, 2**70, 1e308, [], {}, [[[0]]], True, 3])
            break
        spot = spot[key]
    changed = json.dumps(values)
    return f"{hashlib.sha256(changed.encode()).hexdigest()}\n{changed}"


def json_line(draw: random.Random) -> bytes:
    """A line for `read_jsonl`: wrong types, huge lists, deep nesting, or damaged bytes."""
    odd: list[Any] = [
        None, True, -1, 2**63, 2**70, 1e308, float("nan"), "text", [], [[]], {}, [None], [2**80],
        [1.5], ["a"], [1] * 100_000, [0, 1], [True], {"a": 1},
    ]  # fmt: skip
    keys = ["tokens", "response_length", "loss_mask", "rollout_id", "reward", "advantage", "values"]
    record = {"tokens": [1, 2, 3], "response_length": 2}
    for key in draw.sample(keys, draw.randint(1, 3)):
        record[key] = draw.choice(odd)
    line = json.dumps(record).encode()
    kind = draw.randrange(4)
    if kind == 0:
        return draw.choice(DAMAGE[:4])(line, draw)
    if kind == 1:
        return b'{"tokens": ' + draw.choice([b"[", b'{"a":']) * draw.choice([10, 2_000, 200_000])
    return line


def one(seed: int, base: Path, written: list[Sample], met: Counter[str]) -> None:
    """One seed's damage."""
    draw = random.Random(seed)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        shutil.copytree(base, folder / "rollouts")
        must_equal = damage_files(folder / "rollouts", draw)
        read_all(folder / "rollouts", written if must_equal else None, met)
        directory = RolloutDirectory(base, open_timeout=0.0)
        text = directory.plan_json(0)
        assert text is not None
        (folder / "rollouts.jsonl").write_bytes(json_line(draw))
        for action in (
            lambda: checked_plan(forged_plan(text, draw), directory.index(0), LAYOUT, OPTIONS),
            lambda: read_jsonl(folder / "rollouts.jsonl"),
        ):
            try:
                action()
                met["read"] += 1
            except DynbatchError as error:
                met[type(error).__name__] += 1


def make_base(folder: Path) -> list[Sample]:
    """A whole, planned batch with notes."""
    written = random_samples(NUM_SAMPLES, seed=3)
    directory = RolloutDirectory(folder)
    publish_layout(directory, LAYOUT, OPTIONS)
    write_planned(directory, written)
    publish_progress(directory, 1)
    publish_weights(directory, 1, "checkpoints")
    return written


def main() -> None:
    """Read what the command line asks for; prints what was met."""
    first, count = int(sys.argv[1]), int(sys.argv[2])
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    met: Counter[str] = Counter()
    with tempfile.TemporaryDirectory() as name:
        base = Path(name) / "base"
        written = make_base(base)
        for seed in range(first, first + count):
            print(f"seed {seed}", file=sys.stderr, flush=True)
            one(seed, base, written, met)
    print(json.dumps(met))


if __name__ == "__main__":
    main()
