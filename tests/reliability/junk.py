"""Values of every wrong kind, for every public function that takes data from outside.

Each entry calls one such function with right arguments of which some are replaced by junk; it must
return, or raise the package's own error.
"""

from __future__ import annotations

import decimal
import json
import random
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from megatron_dynbatch.handshake import checked_plan, plan_text, read_layout, write_planned
from megatron_dynbatch.plan import ParallelLayout, Plan, PlanOptions, make_plan
from megatron_dynbatch.rollouts import (
    RolloutBatch,
    RolloutDirectory,
    RolloutQueue,
    Sample,
    SampleIndex,
    open_transport,
    read_jsonl,
)
from megatron_dynbatch.rollouts.encoded_batch import decode_batch, encode_batch
from megatron_dynbatch.rollouts.flow import published_weights, training_batch
from megatron_dynbatch.steps import Cursor

LAYOUT = ParallelLayout(dp=2)
OPTIONS = PlanOptions(max_tokens_per_gpu=64)
SAMPLES = [Sample([1, 2, 3], 2, rollout_id=n) for n in range(4)]
INDEX = SampleIndex.from_samples(SAMPLES)


def nested(depth: int) -> Any:
    """A list in a list in a list…"""
    value: Any = 1
    for _ in range(depth):
        value = [value]
    return value


PLAIN: list[Any] = [
    None, True, False, 0, -1, 1.5, 2**31, 2**62, 2**63, 2**64, -(2**70), 10**30, 1e308, -1e308,
    float("nan"), float("inf"), "", "text", "1", "\ud800", "\0", "../x", "x" * 300, "é", [], {},
    [None], [1.5], ["a"], [[1], [2, 3]], [{"a": 1}], {"a": 1}, {"\ud800": 1}, [2**70], [1] * 1000,
    [True], [-1, 5], nested(5), nested(80),
]  # fmt: skip
"""What JSON can hold."""

JUNK: list[Any] = [
    *PLAIN, 10**5000, b"bytes", 3j, {1: 2}, {b"a": 1}, {1: b"x"}, (), set(), object(), Sample,
    range(3), np.array(3), np.zeros((0, 3)), np.zeros((2, 2)), np.array(["a"]),
    np.array([object()]), np.float32("nan"), np.array([2**63], np.uint64),
    np.array([1], "M8[s]"), decimal.Decimal(1),
    np.array([1e39]), np.longdouble("1e400"), Path("a"), SAMPLES[0], lambda: 1, iter([1]),
]  # fmt: skip
"""What a Python caller can hand over."""


def changed(values: dict[str, Any], draw: random.Random, junk: list[Any]) -> dict[str, Any]:
    """Some values replaced, left out, or added under an odd name."""
    values = dict(values)
    for name in draw.sample(sorted(values), draw.randint(1, 2)):
        if draw.random() < 0.1:
            del values[name]
        else:
            values[name] = draw.choice(junk)
    if draw.random() < 0.1:
        values[draw.choice(["extra", "\ud800", "", "../x"])] = draw.choice(junk)
    return values


def spoiled(values: Any, draw: random.Random) -> Any:
    """A copy of JSON values with one, somewhere inside, replaced."""
    values = json.loads(json.dumps(values))
    spot = values
    while True:
        keys = list(spot) if isinstance(spot, dict) else list(range(len(spot)))
        key = draw.choice(keys)
        if not isinstance(spot[key], (dict, list)) or not spot[key] or draw.random() < 0.2:
            spot[key] = draw.choice(PLAIN)
            return values
        spot = spot[key]


def text_of(values: Any, draw: random.Random) -> str:
    """JSON of values; now and then with a key twice, a huge number, or cut."""
    text = json.dumps(values)
    kind = draw.randrange(8)
    if kind == 0:
        text = text[:-1] + ', "version": 1, "version": 2}'
    elif kind == 1:
        text = text.replace("1", draw.choice(["1e999", "NaN", "1" * 5000, "[" * 2000]), 1)
    elif kind == 2:
        text = text[: draw.randrange(len(text))]
    return text


def sample(draw: random.Random) -> object:
    """A sample of odd fields, as a batch, and stored."""
    names = ("rollout_id", "group_id", "policy_version", "reward", "advantage", "values", "blobs")
    fields = dict.fromkeys((*names, "log_probs", "token_arrays", "response_arrays", "loss_mask"))
    given = {"tokens": [1, 2, 3], "response_length": 2, **fields}
    odd = changed(given, draw, JUNK)
    odd.pop("\ud800", None), odd.pop("extra", None), odd.pop("", None), odd.pop("../x", None)
    odd.setdefault("tokens", [1, 2, 3])
    made = Sample(**odd)
    batch = RolloutBatch([made])
    encoded = encode_batch(batch.samples, None, None)
    return decode_batch("batch", encoded)


def batch(draw: random.Random) -> object:
    """Things that are no samples, as a batch."""
    odd = draw.choice(JUNK)
    return RolloutBatch(draw.choice([odd, [odd], [SAMPLES[0], odd]]))


def index(draw: random.Random) -> object:
    """Columns of odd values, planned."""
    names = ("total_lengths", "response_lengths", "mask_sums", "rollout_ids", "group_ids")
    values = {name: getattr(INDEX, name).tolist() for name in names}
    for name in draw.sample(names, draw.randint(1, 2)):
        odd = draw.choice(JUNK)
        if draw.random() < 0.5:
            values[name][draw.randrange(4)] = odd
        else:
            values[name] = odd
    return make_plan(SampleIndex(**values), LAYOUT, OPTIONS)


def layout_note(draw: random.Random) -> object:
    """A note of the trainer's layout, which a writer plans for."""
    values = {"layout": LAYOUT.to_dict(), "options": OPTIONS.to_dict()}
    queue = RolloutQueue("notes")
    queue.publish("layout", text_of(spoiled(values, draw), draw))
    read_layout(queue)
    return write_planned(queue, SAMPLES)


def note(draw: random.Random) -> object:
    """Notes of odd names and texts, and their readers."""
    queue = RolloutQueue("notes")
    queue.publish(draw.choice(["weights", "progress", draw.choice(JUNK)]), draw.choice(JUNK))
    training_batch(queue)
    return published_weights(queue)


def weights_note(draw: random.Random) -> object:
    """A weights note of odd values."""
    queue = RolloutQueue("notes")
    values = spoiled({"version": 1, "where": "checkpoints"}, draw)
    queue.publish("weights", text_of(values, draw))
    queue.publish("progress", draw.choice(["1_0", "-1", "1e3", "9" * 5000, "٣", " 7 "]))
    published_weights(queue)
    return training_batch(queue)


def plan_json(draw: random.Random) -> object:
    """A plan of odd values, checked."""
    values = json.loads(make_plan(INDEX, LAYOUT, OPTIONS).to_json())
    plan = Plan.from_json(text_of(spoiled(values, draw), draw))
    plan.check()
    return checked_plan(plan_text(plan), INDEX, LAYOUT, OPTIONS)


def schedule(draw: random.Random) -> object:
    """A schedule of odd lists."""
    values = list(make_plan(INDEX, LAYOUT, OPTIONS).to_schedule())
    if draw.random() < 0.3:
        values[draw.randrange(4)] = draw.choice(JUNK)
    else:
        values = spoiled(values, draw)
    return Plan.from_schedule(values, INDEX, LAYOUT, OPTIONS)  # type: ignore[arg-type]


def cursor(draw: random.Random) -> object:
    """A cursor of odd fields."""
    if draw.random() < 0.1:
        return Cursor.from_dict(draw.choice(JUNK))
    values = Cursor(batch_id=3, carried=((1, 2), (2, 0))).to_dict()
    return Cursor.from_dict(changed(values, draw, JUNK))


def path(draw: random.Random) -> object:
    """Odd rollout paths; no transport of theirs is used, but a queue's."""
    odd = [*JUNK, "queue:", "s3://b/x", "file:///tmp", "S3:/x", "ray://", "ray://[::1/n",
           "ray:///?x=1", "ray:///n?journal=", "ray:///n#f", "a/" + "b" * 256,
           "http:/x", "ray:///\ud800"]  # fmt: skip
    return open_transport(draw.choice(odd))


def jsonl(draw: random.Random) -> object:
    """Lines of odd values."""
    record = {"tokens": [1, 2, 3], "response_length": 2, "rollout_id": 1, "advantage": 1.0}
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "r.jsonl"
        line = text_of(changed(record, draw, PLAIN), draw)
        file.write_text(line, encoding="utf-8", errors="surrogatepass")
        return read_jsonl(file)


def written(draw: random.Random) -> object:
    """Odd arguments of a directory's methods."""
    with tempfile.TemporaryDirectory() as folder:
        directory = RolloutDirectory(folder, open_timeout=0.0)
        directory.write(SAMPLES)
        odd, other = draw.choice(JUNK), draw.choice(JUNK)
        calls: list[Callable[[], object]] = [
            lambda: directory.write(SAMPLES, odd, key=other),
            lambda: directory.write(SAMPLES, parts=draw.choice([[[odd]], [[0], [odd]]])),
            lambda: directory.publish("note", odd),
            lambda: directory.published(odd),
            lambda: directory.read(odd, [0]),
            lambda: directory.read(0, [odd]),
            lambda: directory.index(odd),
            lambda: directory.state(odd),
        ]
        return draw.choice(calls)()


ENTRIES: dict[str, Callable[[random.Random], object]] = {
    entry.__name__: entry
    for entry in (
        sample, batch, index, layout_note, note, weights_note, plan_json, schedule, cursor, path,
        jsonl, written,
    )
}  # fmt: skip
