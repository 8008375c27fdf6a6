"""Rollouts and references that the whole suite shares; the page of a whole run."""

from __future__ import annotations

import functools
import json
import os
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.parity.page import TABLES, Found, added, page
from tests.parity.reference import Recipe, ReferenceStep, train
from tests.parity.rollouts import SHORT_SIZES, make_steps, write_batches
from tests.pool import ROOT

_measured: dict[str, list[tuple[str, Found]]] = defaultdict(list)


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


@pytest.fixture(scope="session")
def record() -> Callable[[str, str, Found], None]:
    """Put what a cell measured into a table of the page: (table, row, quantity → value)."""
    return lambda table, row, found: _measured[table].append((row, found))


def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    """A whole run in which everything passed writes docs/parity.md; PARITY_ADD=1 adds rows."""
    if hasattr(session.config, "workeroutput"):  # one of several processes: the first one writes
        session.config.workeroutput["parity"] = json.dumps(_measured)
        return
    target = ROOT / "docs" / "parity.md"
    if exitstatus != pytest.ExitCode.OK or not _measured:
        return
    if os.environ.get("PARITY_ADD"):
        target.write_text(added(target.read_text("utf-8"), _measured), encoding="utf-8")
    elif os.environ.get("PARITY") == "full" and _measured.keys() == TABLES.keys():
        target.write_text(page(_measured), encoding="utf-8")


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any, error: object) -> None:
    """What another process of the run has measured."""
    for table, rows in json.loads(getattr(node, "workeroutput", {}).get("parity", "{}")).items():
        _measured[table] += [(row, found) for row, found in rows]
