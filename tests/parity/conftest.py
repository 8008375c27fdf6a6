"""Rollouts and references that the whole suite shares."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.parity.reference import Recipe, ReferenceStep, train
from tests.parity.rollouts import SHORT_SIZES, make_steps, write_batches


@pytest.fixture(scope="session")
def rollout_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The six steps of the suite, one batch each, and END."""
    path = tmp_path_factory.mktemp("rollouts") / "directory"
    write_batches(path, make_steps())
    return path


@pytest.fixture(scope="session")
def short_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three steps; the second has one sample, fewer than there are ranks."""
    path = tmp_path_factory.mktemp("short") / "directory"
    write_batches(path, make_steps(SHORT_SIZES))
    return path


@pytest.fixture(scope="session")
def short_reference() -> Callable[[Recipe], list[ReferenceStep]]:
    """What the independent loop does with the three steps."""
    return functools.cache(lambda recipe: train(make_steps(SHORT_SIZES), recipe))


@pytest.fixture(scope="session")
def reference() -> Callable[[Recipe], list[ReferenceStep]]:
    """What the independent loop does with these steps under a recipe; computed once each."""
    return functools.cache(lambda recipe: train(make_steps(), recipe))
