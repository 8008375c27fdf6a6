"""Named sites on a toy module: what is replaced, what survives, and how a mismatch is told."""

from __future__ import annotations

import ast
import functools
import importlib
import sys
import traceback
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from megatron_dynbatch.hooks.registry import is_sample_product
from megatron_dynbatch.hooks.sites import (
    Site,
    SiteError,
    inspect_sites,
    install_sites,
    uninstall_sites,
)
from tests.reliability.catalogue import shown

SOURCE = '''\
def size(a, b):
    """Doc."""
    unit = 2
    return a * b * unit

def fail(a):
    x = a * 2
    raise KeyError(x)

closure_value = 5
def calls_inner(a):
    def inner():
        return a * 3
    return inner()
'''


@pytest.fixture
def toy(tmp_path: Path) -> Iterator[ModuleType]:
    (tmp_path / "toy_megatron.py").write_text(SOURCE)
    sys.path.insert(0, str(tmp_path))
    sys.modules.pop("toy_megatron", None)
    importlib.invalidate_caches()
    yield importlib.import_module("toy_megatron")
    uninstall_sites()
    sys.path.remove(str(tmp_path))
    sys.modules.pop("toy_megatron", None)


def product(node: ast.expr) -> bool:
    return isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mult)


def site(function: str, handler: Any = lambda value, frame: -value, count: int = 1) -> Site:
    return Site(function, "toy_megatron", function, product, (count,), handler)


def test_the_outermost_match_is_replaced_and_early_bindings_see_it(toy: ModuleType) -> None:
    early = toy.size
    install_sites([site("size")])
    assert early(3, 4) == -24
    assert toy.size is early and early.__doc__ == "Doc."


def test_the_handler_sees_the_frames_locals(toy: ModuleType) -> None:
    seen: dict[str, Any] = {}
    install_sites([site("size", lambda value, frame: seen.update(frame) or value)])
    assert toy.size(3, 4) == 24
    assert seen == {"a": 3, "b": 4, "unit": 2}


def test_tracebacks_keep_file_and_line(toy: ModuleType) -> None:
    install_sites([site("fail")])
    with pytest.raises(KeyError) as caught:
        toy.fail(1)
    frame = traceback.extract_tb(caught.value.__traceback__)[-1]
    assert (frame.filename, frame.lineno) == (toy.__file__, 8)
    assert caught.value.args == (-2,)


def test_nested_functions_are_searched_and_keep_working(toy: ModuleType) -> None:
    install_sites([site("calls_inner")])
    assert toy.calls_inner(2) == -6


def test_uninstall_restores_the_very_code(toy: ModuleType) -> None:
    before = toy.size.__code__
    install_sites([site("size")])
    uninstall_sites()
    assert toy.size.__code__ is before
    assert "__dynbatch_sites__" not in vars(toy)


def test_a_wrong_count_changes_nothing_and_names_every_site(toy: ModuleType) -> None:
    before = toy.size.__code__
    with pytest.raises(SiteError) as caught:
        install_sites([site("size"), site("fail", count=2), site("absent")])
    assert toy.size.__code__ is before
    assert "fail: found 1 times in fail, expected 2" in str(caught.value)
    assert "absent: toy_megatron has no function absent" in str(caught.value)
    shown("this Megatron does not match", str(caught.value))


def test_a_wrapper_that_declares_itself_is_looked_through(toy: ModuleType) -> None:
    original = toy.size

    @functools.wraps(original)
    def logged(*args: Any) -> Any:
        return ("logged", original(*args))

    toy.size = logged
    install_sites([site("size")])
    assert toy.size(3, 4) == ("logged", -24)


def test_a_replacement_is_told(toy: ModuleType) -> None:
    toy.size = lambda a, b: a
    assert [r.problem for r in inspect_sites([site("size")])] != [None]


def test_inspection_after_installation_still_finds_the_originals(toy: ModuleType) -> None:
    install_sites([site("size")])
    (report,) = inspect_sites([site("size")])
    assert report.problem is None and report.lines == (4,)


@pytest.mark.parametrize(
    "source, expected",
    [
        ("get_num_microbatches() * args.micro_batch_size * args.data_parallel_size", True),
        ("mpu.get_data_parallel_world_size() * args.micro_batch_size * get_num_microbatches()",
         True),
        ("args.micro_batch_size * args.data_parallel_size", False),
        ("1 / get_num_microbatches()", False),
    ],
)
def test_sample_products(source: str, expected: bool) -> None:
    assert is_sample_product(ast.parse(source, mode="eval").body) is expected
