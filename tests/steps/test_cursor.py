"""The cursor at batch boundaries, where its batch may still be planned in another way."""

from __future__ import annotations

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
