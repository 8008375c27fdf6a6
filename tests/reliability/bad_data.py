"""Bad samples and bad files: one for each message of docs/errors.md about them."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from megatron_dynbatch.plan import ParallelLayout, PlanOptions
from megatron_dynbatch.rollouts import (
    RolloutDirectory,
    RolloutQueue,
    Sample,
    SampleIndex,
    read_jsonl,
    validate_samples,
)
from megatron_dynbatch.rollouts.flow import training_batch, wait_for_weights
from megatron_dynbatch.rollouts.manifest import write_manifest
from megatron_dynbatch.steps import Staleness, StepFeed

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


def rewritten(name: str, change: Callable[[Any], Any]) -> BadInput:
    """A Parquet file of batch 0 with another table in it, and then everything read."""

    def read(path: Path) -> object:
        file = path / "r" / "batch-00000000" / name
        directory = written(path / "r")
        table = change(pq.read_table(file))
        stamp = pq.read_metadata(file).metadata
        with pq.ParquetWriter(file, table.schema, store_schema=False) as writer:
            writer.write_table(table)
            writer.add_key_value_metadata(stamp)
        write_manifest(file.parent, "stamp")
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
    part = path / "r" / "batch-00000000" / "part-00000.parquet"
    stamp, table = pq.read_metadata(part).metadata, pq.read_table(part)
    with pq.ParquetWriter(part, table.schema, store_schema=False) as writer:
        writer.write_table(table.slice(0, 30))
        writer.add_key_value_metadata(stamp)
    write_manifest(part.parent, "stamp")
    return directory


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
    "a part without masks": rewritten("part-00000.parquet", _without_masks),
    "a part with row numbers as text": rewritten("part-00000.parquet", _rows_as_text),
    "token ids beyond the trainer's vocabulary": lambda path: (
        written(path / "r"),
        RolloutDirectory(path / "r", vocab_size=7).index(0),
    ),
    "a part with rows in another order": rewritten("part-00000.parquet", _swapped_rows),
    "a part of another batch": _two_batches_mixed,
    "a part without its last rows": _cut,
    "a part that the writer did not write": damaged(
        "manifest.json", b'{"stamp": "a", "footers": {}}'
    ),
    "a damaged manifest": damaged("manifest.json", b'{"stamp": "a"'),
    "a row that is not there": lambda path: written(path / "r").read(0, [2]),
    "a field that is not there": lambda path: written(path / "r").read(0, [0], ["entropy"]),
    "a negative batch id": lambda path: written(path / "r").state(-1),
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
    "a line that is nested deeply": line('{"tokens": ' + "[" * 100_000),
}
