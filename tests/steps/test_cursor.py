"""The cursor at batch boundaries, where its batch may still be planned in another way."""

from __future__ import annotations

import json
from typing import Any

import pytest

from megatron_dynbatch.errors import ResumeError
from megatron_dynbatch.steps import Cursor

OPTIONS = {"leftover": "even"}

NO_SOURCE: dict[str, Any] = {"source_id": "", "source_name": "", "stamps": {}}


def test_before_the_first_step_of_a_batch_steps_and_options_may_change() -> None:
    planned = Cursor().in_batch(OPTIONS, "a", NO_SOURCE)
    planned.check_options({"leftover": "drop"})
    assert planned.in_batch(OPTIONS, "b", NO_SOURCE).steps_digest == "b"
    begun = planned.after_step(4, empty=False)
    with pytest.raises(ResumeError, match="leftover='even', but now leftover='drop'"):
        begun.check_options({"leftover": "drop"})
    with pytest.raises(ResumeError, match="other rollouts form its steps"):
        begun.in_batch(OPTIONS, "b", NO_SOURCE)


def test_inside_a_batch_whose_options_are_not_known_anything_goes() -> None:
    Cursor(step_index=1).check_options({"leftover": "drop"})
    assert Cursor(step_index=1).in_batch(OPTIONS, "b", NO_SOURCE).steps_digest == "b"


def test_a_batch_without_stale_rollouts_adds_none() -> None:
    assert Cursor(stale_rollouts=3).after_batch((), 2) == Cursor(
        batch_id=1, stale_rollouts=3, dropped_rollouts=2
    )


def test_a_training_begins_with_nothing_behind_it() -> None:
    assert Cursor() == Cursor(0, 0, (), 0, 0, 0, 0, None, None, "", "", {})


def test_steps_and_batches_add_up() -> None:
    source = {"source_id": "i", "source_name": "n", "stamps": {"7": "rows:b"}}
    cursor = Cursor(7, 2, ((5, 1),), 40, 3, 1, 2, stamps={5: "rows:x", 6: "rows:a"})
    planned = cursor.in_batch(OPTIONS, "d", source)
    stamps = {5: "rows:x", 6: "rows:a", 7: "rows:b"}
    assert planned == Cursor(7, 2, ((5, 1),), 40, 3, 1, 2, OPTIONS, "d", "i", "n", stamps)
    trained = planned.after_step(4, empty=False)
    assert trained == Cursor(7, 3, ((5, 1),), 44, 3, 1, 2, OPTIONS, "d", "i", "n", stamps)
    assert trained.after_step(2, empty=True) == Cursor(
        7, 4, ((5, 1),), 46, 3, 2, 2, OPTIONS, "d", "i", "n", stamps
    )
    assert trained.after_batch(((5, 1), (7, 0)), 5, 6) == Cursor(
        8, 0, ((5, 1), (7, 0)), 44, 8, 1, 8, None, None, "i", "n", {5: "rows:x", 7: "rows:b"}
    )
    assert cursor.first_batch == 5 and Cursor(batch_id=7).first_batch == 7


@pytest.mark.parametrize(
    ("before", "now", "is_changed"),
    [
        ("rows:a", "rows:a", False),
        ("rows:a", "rows:b", True),
        ("rows:a", "files:b", False),
        ("", "rows:b", False),
    ],
)
def test_stamps_of_one_kind_tell_what_changed(before: str, now: str, is_changed: bool) -> None:
    cursor = Cursor(batch_id=3, stamps={2: before})
    source = {**NO_SOURCE, "stamps": {2: now}}
    if not is_changed:
        assert cursor.in_batch(OPTIONS, "a", source).stamps == {2: now}
        return
    with pytest.raises(ResumeError, match="rollout batch 2 is not the one"):
        cursor.in_batch(OPTIONS, "a", source)


def test_the_same_steps_and_options_may_go_on() -> None:
    begun = Cursor().in_batch(OPTIONS, "a", NO_SOURCE).after_step(4, empty=False)
    begun.check_options({"leftover": "even"})
    assert begun.in_batch(OPTIONS, "a", NO_SOURCE) == begun


def test_a_cursor_is_written_and_read_whole() -> None:
    cursor = Cursor(4, 1, ((1, 0), (3, 2)), 9, 8, 7, 6, OPTIONS, "d", "i", "n", {3: "rows:a"})
    values = cursor.to_dict()
    assert values == {
        "batch_id": 4, "step_index": 1, "carried": ((1, 0), (3, 2)), "consumed_rollouts": 9,
        "dropped_rollouts": 8, "empty_steps": 7, "stale_rollouts": 6, "step_options": OPTIONS,
        "steps_digest": "d", "source_id": "i", "source_name": "n", "stamps": {3: "rows:a"},
    }  # fmt: skip
    assert type(values["step_options"]) is dict and values["step_options"] is not OPTIONS
    assert Cursor.from_dict(json.loads(json.dumps(values))) == cursor
    assert Cursor().to_dict()["step_options"] is None
    assert Cursor.from_dict(Cursor().to_dict()) == Cursor()


FINE: list[tuple[str, Any]] = [
    ("batch_id", 2**63 - 1), ("consumed_rollouts", 0), ("carried", [[0, 0], [3, 5]]),
    ("carried", ((3, 0),)), ("step_options", {}), ("steps_digest", None), ("stamps", {3: "a"}),
    ("stamps", {"1" * 18: "a"}),
]  # fmt: skip


@pytest.mark.parametrize(("name", "value"), FINE, ids=str)
def test_what_a_cursor_may_hold(name: str, value: Any) -> None:
    read = Cursor.from_dict({**Cursor(batch_id=4).to_dict(), name: value})
    found = getattr(read, name)
    if name == "carried":
        value = tuple(map(tuple, value))
    elif name == "stamps":
        value = {int(batch): stamp for batch, stamp in value.items()}
    assert found == value and type(found) is type(value)


DAMAGED: list[tuple[str, Any]] = [
    ("batch_id", 2**63), ("batch_id", -1), ("step_index", True), ("empty_steps", 1.0),
    ("stale_rollouts", "1"), ("dropped_rollouts", None), ("consumed_rollouts", -1),
    ("carried", 5), ("carried", [1]), ("carried", ["ab"]), ("carried", [[1]]),
    ("carried", [[1, 2, 3]]), ("carried", [[1, -1]]), ("carried", {(1, 2): 3}),
    ("step_options", "leftover"), ("step_options", {1: 2}), ("steps_digest", 3),
    ("source_id", None), ("source_name", 5), ("stamps", ["3"]), ("stamps", {"3": 4}),
    ("stamps", {"three": "a"}), ("stamps", {"1" * 19: "a"}), ("stamps", {-1: "a"}),
    ("stamps", {None: "a"}), ("stamps", {"²": "a"}),
]  # fmt: skip


@pytest.mark.parametrize(("name", "value"), DAMAGED, ids=str)
def test_a_field_of_another_kind_is_named(name: str, value: Any) -> None:
    with pytest.raises(ResumeError, match=f"cannot be used: {name} is .*, not "):
        Cursor.from_dict({**Cursor(batch_id=4).to_dict(), name: value})


def test_missing_and_unknown_fields_are_named() -> None:
    values = Cursor(batch_id=4).to_dict()
    with pytest.raises(ResumeError, match="consumed_rollouts is missing"):
        Cursor.from_dict({n: v for n, v in values.items() if n != "consumed_rollouts"})
    with pytest.raises(ResumeError, match="it has a field 'epoch', which is unknown here"):
        Cursor.from_dict({**values, "epoch": 1})
    with pytest.raises(ResumeError, match="cannot be used: it is "):
        Cursor.from_dict([])  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("carried", "said"),
    [
        ([[1, 2], [1, 2]], "carried names a sample twice"),
        ([[1, 2], [4, 0]], "carried names a sample that is not before batch 4"),
    ],
)
def test_carried_samples_are_of_batches_before(carried: Any, said: str) -> None:
    with pytest.raises(ResumeError, match=said):
        Cursor.from_dict({**Cursor(batch_id=4).to_dict(), "carried": carried})
