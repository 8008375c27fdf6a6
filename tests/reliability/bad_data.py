"""Bad samples and bad files: one for each message of docs/errors.md about them."""

from __future__ import annotations

import io
import itertools
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pyarrow as pa

from megatron_dynbatch.plan import ParallelLayout, PlanOptions
from megatron_dynbatch.rollouts import (
    RolloutBatch,
    RolloutDirectory,
    RolloutQueue,
    Sample,
    SampleIndex,
    checked_paths,
    jsonl,
    read_jsonl,
    validate_samples,
)
from megatron_dynbatch.rollouts.flow import training_batch, wait_for_weights
from megatron_dynbatch.rollouts.manifest import write_manifest
from megatron_dynbatch.steps import Staleness, StepFeed
from tests.rollouts.forging import INDEX, PART, Change, forge, replaced

BadInput = Callable[[Path], object]

OPTIONS = PlanOptions(max_tokens_per_gpu=16)


def good(**fields: Any) -> Sample:
    """A sample of three tokens, two of them the response."""
    return Sample([5, 6, 7], 2, **fields)


def batch(*samples: Sample, **options: Any) -> BadInput:
    """These samples as a batch."""
    return lambda path: validate_samples(samples, **options)


def made(*args: Any, **fields: Any) -> BadInput:
    """A sample of these arguments."""
    return lambda path: Sample(*args, **fields)


SAMPLES: dict[str, BadInput] = {
    "text in the place of token ids": made(["a", "b"], 1),
    "floats in the place of token ids": made([1.0, 2.0], 1),
    "a sample of 2^24 tokens and one more": made(np.zeros(2**24 + 1, np.int8), 1),
    "a response of 10^12 tokens": made([1, 2], 10**12),
    "a list of token arrays": made([1, 2], 1, token_arrays=[[1, 2]]),
    "a ragged token array": made([1, 2], 1, token_arrays={"experts": [[1], [1, 2]]}),
    "a number as the name of a blob": made([1, 2], 1, blobs={1: b"png"}),
    "half a character as the name of a blob": made([1, 2], 1, blobs={"\ud800": b"png"}),
    "two samples in one": made([[1, 2], [3, 4]], 1),
    "no response": made([1, 2]),
    "a negative response": made([1, 2], -1),
    "a mask of another length than the response": made([1, 2, 3, 4], 3, [1, 1]),
    "a weight in the mask": made([1, 2], loss_mask=[0.5]),
    "a word as the reward": made([1, 2], 1, reward="high"),
    "a word as the rollout id": made([1, 2], 1, rollout_id="a"),
    "an id of 65 bits": made([1, 2], 1, rollout_id=2**64),
    "text as a token array": made([1, 2], 1, token_arrays={"words": ["a", "b"]}),
    "a name that is none": made([1, 2], 1, token_arrays={"my words": [1, 2]}),
    "text as a blob": made([1, 2], 1, blobs={"image": "png"}),
    "an empty batch": batch(),
    "a list of dicts": batch({"tokens": [1, 2]}),  # type: ignore[arg-type]
    "no list of samples": lambda path: RolloutBatch(good()),  # type: ignore[arg-type]
    "samples without end": lambda path: RolloutBatch(itertools.repeat(good())),
    "an advantage beyond float32": batch(good(advantage=1e308)),
    "a log-prob beyond float32": batch(good(log_probs=[-1e39, -1.0])),
    "a sample without tokens": batch(Sample([], 0)),
    "another tokenizer's id": batch(good(), vocab_size=7),
    "a negative token id": batch(Sample([5, -6, 7], 2)),
    "a mask longer than the sample": batch(Sample([1, 2], loss_mask=[0, 1, 1])),
    "a trained first token": batch(Sample([1, 2], loss_mask=[1, 1])),
    "a negative rollout id": batch(good(rollout_id=-2)),
    "a reward that is NaN": batch(good(reward=float("nan"))),
    "log-probs of the prompt too": batch(good(log_probs=[0.0, -1.0, -1.0])),
    "a trained log-prob that is NaN": batch(good(log_probs=[-1.0, float("nan")])),
    "a rollout in two prompt groups": batch(
        good(rollout_id=1, group_id=1), good(rollout_id=1, group_id=2)
    ),
    "an advantage for one sample only": batch(good(advantage=1.0), good()),
    "a token array of another length": batch(good(token_arrays={"experts": [1, 2]})),
    "token arrays of two types": batch(
        good(token_arrays={"experts": [1, 2, 3]}), good(token_arrays={"experts": [1.0, 2, 3]})
    ),
    "a token array for one sample only": batch(good(token_arrays={"experts": [1, 2, 3]}), good()),
    "an index of more rows than a batch has": lambda path: SampleIndex(
        *[np.ones(2**19 + 1, np.int64)] * 5
    ).check(),
    "an index with a sample of 2^24 tokens and one more": lambda path: SampleIndex(
        [2**24 + 1], [3], [1], [-1], [-1]
    ).check(),
    "an index with impossible lengths": lambda path: SampleIndex([2], [3], [1], [-1], [-1]).check(),
}


def written(path: Path, *samples: Sample, **options: Any) -> RolloutDirectory:
    """A directory with one batch."""
    directory = RolloutDirectory(path, open_timeout=0.0, **options)
    directory.write(samples or (good(rollout_id=0), good(rollout_id=1)))
    return directory


def damaged(name: str, content: bytes | None) -> BadInput:
    """A file of batch 0 replaced, or removed, and then everything read."""

    def read(path: Path) -> object:
        file = path / "r" / "batch-00000000" / name
        directory = written(path / "r")
        if content is None:
            file.unlink()
        else:
            file.write_bytes(content)
        return directory.plan_json(0), directory.read(0, [0])

    return read


def rewritten(name: str, change: Change, **options: Any) -> BadInput:
    """A Parquet file of batch 0 with another table in it, and then everything read."""

    def read(path: Path) -> object:
        arrays = {"token_arrays": {"experts": [1, 2, 3]}}
        directory = written(path / "r", *(good(rollout_id=n, **arrays) for n in range(2)))
        forge(path / "r" / "batch-00000000", name, change, **options)
        return directory.index(0), directory.read(0, [0, 1])

    return read


def marked(text: str) -> BadInput:
    """A directory whose marker says this."""

    def look(path: Path) -> object:
        (path / "dynbatch.json").write_text(text)
        return RolloutDirectory(path, open_timeout=0.0).state(0)

    return look


def noted(name: str, text: str, read: Callable[[RolloutQueue], object]) -> BadInput:
    """A note of the other side that says this."""

    def look(path: Path) -> object:
        queue = RolloutQueue("notes")
        queue.publish(name, text)
        return read(queue)

    return look


def _file(path: Path) -> object:
    (path / "file").write_text("")
    return RolloutDirectory(path / "file").state(0)


def _foreign(path: Path) -> object:
    (path / "data.txt").write_text("")
    return RolloutDirectory(path).state(0)


def _deleted(path: Path) -> object:
    directory = written(path / "r")
    directory.delete_before(1)
    return directory.state(0)


def _missing(path: Path) -> object:
    directory = written(path / "r")
    directory.finish()
    (path / "r" / "batch-00000000").rename(path / "elsewhere")
    return directory.state(0)


def _stray(path: Path) -> object:
    directory = written(path / "r")
    (path / "r" / "batch-00000001").mkdir()
    return directory.write([good()])


def _nothing_to_train(path: Path) -> object:
    queue = RolloutQueue("generator")
    for _ in range(2):
        queue.write([Sample([5, 6, 7], loss_mask=[0, 0])])
    return StepFeed(queue, ParallelLayout(), OPTIONS, max_empty_batches=2).open_step()


def _finished(path: Path) -> object:
    directory = written(path / "r")
    directory.finish()
    return directory.write([good()])


def _end_at_once(path: Path) -> object:
    queue = RolloutQueue("generator")
    queue.finish()
    return StepFeed(queue, ParallelLayout(), OPTIONS).open_step()


def damaged_cell(path: Path) -> object:
    """A bit of a cell turned over; the footer has no part in it."""
    directory = written(path / "r", *(Sample(range(100, 400), 2) for _ in range(2)))
    file = path / "r" / "batch-00000000" / PART
    content = file.read_bytes()
    place = content.index(np.arange(300, 320, dtype=np.int32).tobytes())
    file.write_bytes(content[:place] + b"\1" + content[place + 1 :])
    return directory.read(0, [0])


def _two_batches_mixed(path: Path) -> object:
    written(path / "r"), written(path / "other")
    part = "batch-00000000/part-00000.parquet"
    shutil.copy(path / "other" / part, path / "r" / part)
    return RolloutDirectory(path / "r").read(0, [0])


def _changed_batch(path: Path) -> object:
    queue = RolloutQueue("generator")
    queue.write([good()])
    feed = StepFeed(queue, ParallelLayout(), OPTIONS)
    queue.read = lambda *args: [Sample([1, 2], 1)]  # type: ignore[method-assign]
    return feed.open_step()


def _stale_without_weights(path: Path) -> object:
    queue = RolloutQueue("generator")
    queue.write([good(policy_version=0)])
    queue.write([good(policy_version=0)])
    feed = StepFeed(queue, ParallelLayout(), OPTIONS, staleness=Staleness(0, "train"))
    feed.open_step()
    feed.finish_step()
    return feed.open_step()


def _exchanged(path: Path) -> object:
    directory = written(path / "r")
    RolloutDirectory(path / "other").write([good(rollout_id=0), good(rollout_id=2)])
    part = "batch-00000000/part-00000.parquet"
    shutil.copy(path / "other" / part, path / "r" / part)
    write_manifest(path / "r" / "batch-00000000", "stamp")
    return directory.content_stamp(0, verify=True)


def _cut(path: Path) -> object:
    return _cut_part(path).read(0, [35])


def _cut_part(path: Path) -> RolloutDirectory:
    directory = written(path / "r", *(good(rollout_id=n) for n in range(40)))
    forge(path / "r" / "batch-00000000", PART, lambda table: table.slice(0, 30))
    return directory


def _cut_behind(path: Path) -> object:
    directory = written(path / "r", *(good(rollout_id=n) for n in range(40)))
    forge(path / "r" / "batch-00000000", PART, lambda table: table.slice(0, 30))
    return directory.read(0, [5])


def _in_place(name: str, put: Callable[[Path], object]) -> BadInput:
    """Something else in the place of a file of batch 0, and then everything read."""

    def read(path: Path) -> object:
        directory = written(path / "r")
        file = path / "r" / "batch-00000000" / name
        file.rename(path / "moved")
        put(file)
        return directory.plan_json(0), directory.read(0, [0])

    return read


def _long(path: Path) -> object:
    with mock.patch.object(checked_paths.own_bytes, "__kwdefaults__", {"most": 10}):
        return damaged("manifest.json", b" " * 11)(path)


def _long_line(path: Path) -> object:
    with mock.patch.object(jsonl, "MAX_LINE_BYTES", 10):
        return line("x" * 11)(path)


def _rows_twice(table: Any) -> Any:
    return table.append_column("row", table.column("row"))


def _npy(content: bytes) -> BadInput:
    """These bytes in the place of an array."""

    def read(path: Path) -> object:
        directory = written(path / "r", good(token_arrays={"experts": [1, 2, 3]}))
        batch, name = path / "r" / "batch-00000000", "token_arrays/experts"
        forge(batch, PART, replaced(name, pa.array([content], pa.binary())))
        size = pa.array([len(content)], pa.int32())
        forge(batch, INDEX, replaced(f"cells/{name}", size))
        return directory.read(0, [0])

    return read


def _large_array() -> bytes:
    shape = {"shape": (1 << 40,), "fortran_order": False, "descr": "<f8"}
    buffer = io.BytesIO()
    np.lib.format.write_array_header_1_0(buffer, shape)
    return buffer.getvalue()


def line(text: str) -> BadInput:
    """A JSON-lines file with this line."""

    def read(path: Path) -> object:
        (path / "rollouts.jsonl").write_text(text)
        return read_jsonl(path / "rollouts.jsonl")

    return read


def _swapped_rows(table: Any) -> Any:
    return table.take([1, 0])


def _without_masks(table: Any) -> Any:
    return table.drop_columns(["loss_mask"])


def _rows_as_text(table: Any) -> Any:
    place = table.schema.get_field_index("row")
    return table.set_column(place, "row", pa.array(["0", "1"]))


def _index(name: str, values: list[int], kind: Any = None) -> BadInput:
    """A column of the index replaced."""
    return rewritten(INDEX, replaced(name, pa.array(values, kind or pa.int32())))


STORAGE: dict[str, BadInput] = {
    "a file as the directory": _file,
    "a directory of something else": _foreign,
    "a damaged marker": marked("{"),
    "a marker of another program": marked('{"format": "something else"}'),
    "a marker of another version": marked('{"format": "megatron-dynbatch rollouts", "version": 1}'),
    "a marker that was never written": marked(""),
    "a marker with a number as the id": marked(
        '{"format": "megatron-dynbatch rollouts", "version": 3, "id": 1}'
    ),
    "a part exchanged with its manifest": _exchanged,
    "a part with fewer rows and a manifest that fits": lambda path: (
        _cut_part(path),
        RolloutDirectory(path / "r").content_stamp(0, verify=True),
    ),
    "reading before there is anything": lambda path: RolloutDirectory(path).index(0),
    "writing after the end": _finished,
    "reading what is not there": lambda path: RolloutDirectory(path / "r").index(0),
    "a path with a typing error": lambda path: StepFeed(
        RolloutDirectory(path / "r"), ParallelLayout(), OPTIONS, batch_timeout=0.05
    ).open_step(),
    "masks that are all zero": _nothing_to_train,
    "a batch that is missing": _missing,
    "a folder that is no batch": _stray,
    "a batch that retention deleted": _deleted,
    "a run without rollouts": _end_at_once,
    "a part that is gone": damaged("part-00000.parquet", None),
    "a truncated part": damaged("part-00000.parquet", b"PAR1"),
    "a part without masks": rewritten(PART, _without_masks),
    "a part with row numbers as text": rewritten(PART, _rows_as_text, sums=False),
    "token ids beyond the trainer's vocabulary": lambda path: (
        written(path / "r"),
        RolloutDirectory(path / "r", vocab_size=7).index(0),
    ),
    "a part with rows in another order": rewritten(PART, _swapped_rows),
    "a part of another batch": _two_batches_mixed,
    "a compressed part": rewritten(PART, lambda table: table, compression="zstd"),
    "a part with fewer rows than the index says": _cut_behind,
    "a part with fewer tokens than the index says": _index("total_length", [90, 3], pa.int64()),
    "a part with other tokens than its checksums say": damaged_cell,
    "a part with a column twice": rewritten(PART, _rows_twice, sums=False),
    "an index without the sizes of a column": rewritten(
        INDEX, lambda table: table.drop_columns(["cells/token_arrays/experts"])
    ),
    "an index with two samples in one place": _index("part_row", [0, 0]),
    "an index with a sample of 10^12 tokens": _index("total_length", [10**12, 3], pa.int64()),
    "an index with an empty cell": rewritten(
        INDEX, replaced("group_id", pa.array([None, 1], pa.int64()))
    ),
    "an array that is no .npy": _npy(b"\x93NUMPY"),
    "an array that claims 8 TB": _npy(_large_array()),
    "a link in the place of a part": _in_place(
        PART, lambda file: file.symlink_to(file.parents[2] / "moved")
    ),
    "a pipe in the place of the manifest": _in_place("manifest.json", os.mkfifo),
    "a manifest of a gigabyte": _long,
    "a manifest with a key twice": damaged("manifest.json", b'{"stamp": "a", "stamp": "b"}'),
    "a part without its last rows": _cut,
    "a part that the writer did not write": damaged(
        "manifest.json", b'{"stamp": "a", "footers": {}}'
    ),
    "a damaged manifest": damaged("manifest.json", b'{"stamp": "a"'),
    "a row that is not there": lambda path: written(path / "r").read(0, [2]),
    "a field that is not there": lambda path: written(path / "r").read(0, [0], ["entropy"]),
    "a negative batch id": lambda path: written(path / "r").state(-1),
    "a batch id that is text": lambda path: written(path / "r").state("0"),  # type: ignore[arg-type]
    "a batch id of 65 bits": lambda path: written(path / "r").state(2**64),
    "a key that is half a character": lambda path: RolloutQueue("q").write([good()], key="\ud800"),
    "a note that is no text": lambda path: written(path / "r").publish("n", b""),  # type: ignore[arg-type]
    "a note name of 300 letters": lambda path: written(path / "r").publish("n" * 300, ""),
    "more blobs than a batch has columns": lambda path: written(
        path / "r", good(blobs={f"b{n}": b"" for n in range(1025)})
    ),
    "an empty key": lambda path: RolloutDirectory(path / "r").write([good()], key=""),
    "a note with a path as its name": lambda path: written(path / "r").publish("../note", ""),
    "a plan that is no text": damaged("plan.json", b"\xff"),
    "a progress note of something else": noted("progress", "soon", training_batch),
    "a weights note of something else": noted(
        "weights", "[]", lambda queue: wait_for_weights(queue, 0, timeout=0)
    ),
    "a batch that changes": _changed_batch,
    "stale rollouts without their log-probs": _stale_without_weights,
    "a line that is not JSON": line("tokens"),
    "a line that is a list": line("[1, 2]"),
    "a line with an unknown key": line('{"tokens": [1, 2], "response": [2]}'),
    "a line without tokens": line('{"response_length": 1}'),
    "a line with a key twice": line('{"tokens": [1, 2], "tokens": [3, 4], "response_length": 1}'),
    "a line of a gigabyte": _long_line,
    "a line with half a character": line('{"tokens": [1, 2], "response_length": 1, "\\ud800": 1}'),
    "a line that is nested deeply": line('{"tokens": ' + "[" * 100_000),
}
