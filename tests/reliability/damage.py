"""Damages rollout files in every way and reads them, in a process of its own: it must not crash.

    python -m tests.reliability.damage FIRST COUNT

reads COUNT damaged directories and JSON files, drawn from seeds FIRST, FIRST + 1… Whatever is read
must equal what was written, or raise the package's own error. Memory is limited, so that a length
in a damaged file that is believed shows as a crash.
"""

from __future__ import annotations

import json
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
from megatron_dynbatch.plan import ParallelLayout, PlanOptions
from megatron_dynbatch.plan.handshake import (
    checked_plan,
    publish_layout,
    read_layout,
    write_planned,
)
from megatron_dynbatch.rollouts import RolloutDirectory, Sample, read_jsonl
from megatron_dynbatch.rollouts.flow import (
    publish_progress,
    publish_weights,
    published_weights,
    training_batch,
)
from megatron_dynbatch.rollouts.manifest import write_manifest
from tests.rollouts.helpers import assert_same_samples, random_samples

LAYOUT = ParallelLayout(dp=2)
OPTIONS = PlanOptions(max_tokens_per_gpu=64)
NUM_SAMPLES = 9
MEMORY_BYTES = 6 << 30


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
    """The same rows with one column of another type, empty, or missing; checksums are right."""
    table, stamp = pq.read_table(path), pq.read_metadata(path).metadata
    place = draw.randrange(table.num_columns)
    name, rows = table.column_names[place], table.num_rows
    others: list[Any] = [
        None,
        pa.nulls(rows, table.schema.field(place).type),
        pa.array(["text"] * rows),
        pa.array([[[1]]] * rows),
        pa.array([-(2**62)] * rows),
        pa.array([[2**31 - 1] * 10_000] * rows, pa.list_(pa.int32())),
    ]
    other = draw.choice(others)
    changed = table.remove_column(place) if other is None else table.set_column(place, name, other)
    with pq.ParquetWriter(path, changed.schema, store_schema=False) as writer:
        writer.write_table(changed)
        writer.add_key_value_metadata(stamp)
    write_manifest(path.parent, "stamp")


def damage_files(folder: Path, draw: random.Random) -> bool:
    """Damage one file of a directory; returns whether what is read must be what was written."""
    batch = folder / "batch-00000000"
    path = draw.choice([*sorted(batch.iterdir()), *sorted((folder / "notes").iterdir())])
    if path.suffix == ".parquet" and draw.random() < 0.2:
        retyped(path, draw)
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
