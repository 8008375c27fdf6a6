"""Each bad input has the error that docs/errors.md describes; each line there has a bad input."""

from __future__ import annotations

import ast
import functools
import importlib
import pkgutil
import tempfile
from pathlib import Path

import pytest

import megatron_dynbatch
from megatron_dynbatch.errors import DynbatchError
from tests.pool import ROOT
from tests.reliability.bad_input import BAD_INPUT, SHOWN_ELSEWHERE
from tests.reliability.catalogue import catalogue, pattern

CATALOGUE = catalogue()


@functools.cache
def met(kind: str) -> DynbatchError:
    """What a bad input leads to."""
    with tempfile.TemporaryDirectory() as folder, pytest.raises(DynbatchError) as raised:
        BAD_INPUT[kind](Path(folder))
    return raised.value


@pytest.mark.parametrize("kind", BAD_INPUT)
def test_bad_input(kind: str) -> None:
    name, message = type(met(kind)).__name__, str(met(kind))
    lines = [line for classes, line in CATALOGUE if name in classes]
    assert any(pattern(line).fullmatch(message) for line in lines), f"{name}: {message}"


def test_every_line_of_the_page_has_a_bad_input() -> None:
    assert len(BAD_INPUT) >= 50
    messages = [str(met(kind)) for kind in BAD_INPUT]
    unshown = [
        line
        for _, line in CATALOGUE
        if not any(pattern(line).fullmatch(message) for message in messages)
    ]
    for start, test in SHOWN_ELSEWHERE.items():
        assert any(line.startswith(start) for line in unshown)
        assert start in shown_by(test), f"{test} does not call shown({start!r}, …)"
    assert [line for line in unshown if not line.startswith(tuple(SHOWN_ELSEWHERE))] == []


def shown_by(test: str) -> set[str]:
    """First arguments of the calls of `shown` in a test, given as file::name."""
    file, _, name = test.partition("::")
    tree = ast.parse((ROOT / file).read_text(encoding="utf-8"))
    functions = [
        node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == name
    ]
    assert len(functions) == 1, f"there is no test {test}: name it as file::function"
    calls = [node for node in ast.walk(functions[0]) if isinstance(node, ast.Call)]
    return {
        ast.literal_eval(call.args[0])
        for call in calls
        if isinstance(call.func, ast.Name) and call.func.id == "shown"
    }


def test_every_class_is_on_the_page() -> None:
    for module in pkgutil.walk_packages(megatron_dynbatch.__path__, "megatron_dynbatch."):
        if module.name.partition(".")[2].split(".")[0] not in ("cli", "cpu", "run", "patched"):
            importlib.import_module(module.name)
    names = {name for classes, _ in CATALOGUE for name in classes} | {"KernelError"}
    assert {cls.__name__ for cls in _subclasses(DynbatchError)} == names


def _subclasses(cls: type) -> set[type]:
    return {cls for child in cls.__subclasses__() for cls in {child, *_subclasses(child)}}
