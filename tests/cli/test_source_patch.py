"""Statements of a source patch have the effect of the hooks, on a small tree written here."""

from __future__ import annotations

import ast
import importlib.util
import itertools
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_dynbatch.cli import source_patch
from megatron_dynbatch.cli.tree import MARK, Tree, without_patch
from megatron_dynbatch.hooks.seams import Seam
from megatron_dynbatch.hooks.sites import Site, SiteError, install_sites, uninstall_sites

SOURCE = '''\
"""A toy."""
from __future__ import annotations

import math
from math import (
    floor,
    ceil,
)

class Box:
    @staticmethod
    def fold(x):
        return x

    def hold(self):
        return floor(2.5)

def size(a, b):
    result = (
        a
        * b
    )
    return result

def loop(args, iteration, log):
    last = 0
    while iteration < args.limit:
        log.append(iteration)
        if iteration // 2 != last and iteration != 0:
            log.append("changed")
        last = iteration // 2
        if iteration % 3 == 1:
            iteration += 1
            continue
        for number in range(2):
            if number:
                continue
            log.append(-number)
        iteration += 1
        if iteration == 11:
            break
    log.append(f"end {iteration}")
    return last
'''
MODULE = "megatron.toy"


def is_product(node: ast.expr) -> bool:
    return isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mult)


def is_text(text: str) -> Callable[[ast.expr], bool]:
    return lambda node: ast.unparse(node) == text


def site(name: str, function: str, matches: Any, handler: Any = None, module: str = MODULE) -> Site:
    return Site(name, module, function, matches, (1,), handler or (lambda value, frame: value))


SITES = (
    site("size", "size", is_product),
    site("condition", "loop", is_text("iteration < args.limit")),
    site("change", "loop", is_text("iteration // 2 != last")),
)
SEAMS = (
    Seam(MODULE, "ceil", lambda original: original),
    Seam(MODULE, "size", lambda original: original),
    Seam(MODULE, "Box.fold", lambda original: original),
    Seam(MODULE, "Box.hold", lambda original: original),
    Seam(MODULE, "not_yet", lambda original: original, since=(0, 99)),
)


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Tree:
    return make_tree(tmp_path_factory.mktemp("tree"), SOURCE)


def make_tree(root: Path, source: str, sites: Any = SITES, seams: Any = SEAMS) -> Tree:
    (root / "megatron" / "core").mkdir(parents=True)
    info = 'MAJOR = 0\nMINOR = 19\nPATCH = 2\nPRE_RELEASE = "rc1"\n'
    (root / "megatron" / "core" / "package_info.py").write_text(info)
    (root / "megatron" / "toy.py").write_text(source)
    return Tree(root, sites, seams)


names = itertools.count()


def load(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"toy_{next(names)}", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def patched_loop(tree: Tree, tmp_path_factory: pytest.TempPathFactory) -> ModuleType:
    path = tmp_path_factory.mktemp("patched") / "toy.py"
    path.write_text(source_patch.patched(tree)[MODULE])
    return load(path)


@pytest.fixture(scope="module")
def hooked_loop(tree: Tree) -> Iterator[tuple[ModuleType, dict[str, Any]]]:
    module = load(tree.root / "megatron" / "toy.py")
    sys.modules[module.__name__] = module
    handlers: dict[str, Any] = {}
    install_sites([
        Site(s.name, module.__name__, s.function, s.matches, s.counts,
             lambda value, frame, name=s.name: handlers[name](value, frame))
        for s in SITES
    ])
    yield module, handlers
    uninstall_sites()
    del sys.modules[module.__name__]


@given(
    start=st.integers(0, 4),
    limit=st.integers(0, 13),
    decisions=st.lists(st.sampled_from(["stock", True, False]), max_size=14),
    unchanged=st.sets(st.integers(0, 12)),
)
def test_a_patched_loop_runs_like_a_hooked_one(
    patched_loop: ModuleType,
    hooked_loop: tuple[ModuleType, dict[str, Any]],
    start: int,
    limit: int,
    decisions: list[Any],
    unchanged: set[int],
) -> None:
    def run(module: ModuleType, put: Callable[[dict[str, Any]], None]) -> list[Any]:
        log: list[Any] = []
        left = iter(decisions)

        def condition(stock: bool, frame: Any) -> bool:
            log.append(("asked", stock, frame["iteration"]))
            decision = next(left, "stock")
            return stock if decision == "stock" else decision

        def change(stock: bool, frame: Any) -> bool:
            return stock and frame["iteration"] not in unchanged

        put({"condition": condition, "change": change})
        log.append(module.loop(SimpleNamespace(limit=limit), start, log))
        return log

    def put_patched(handlers: dict[str, Any]) -> None:
        patched_loop.dynbatch_site = lambda name, value, frame: handlers[name](value, frame)  # type: ignore[attr-defined]

    hooked, handlers = hooked_loop
    assert run(patched_loop, put_patched) == run(hooked, handlers.update)


def test_an_assignment_is_followed_by_its_hook(patched_loop: ModuleType) -> None:
    seen: list[Any] = []

    def handler(name: str, value: Any, frame: Any) -> Any:
        seen.append((name, value, frame["a"], frame["b"]))
        return -value

    patched_loop.dynbatch_site = handler  # type: ignore[attr-defined]
    # Behind the seam, which belongs to no registry here.
    assert patched_loop.size.__wrapped__(3, 4) == -12
    assert seen == [("size", 12, 3, 4)]


def test_seams_are_bound_again_behind_their_definition(tree: Tree) -> None:
    lines = source_patch.patched(tree)[MODULE].splitlines()
    after = {line.strip(): lines[number - 1] for number, line in enumerate(lines)}
    call = "{0} = dynbatch_seam('megatron.toy:{1}', {0})" + MARK
    assert after[call.format("ceil", "ceil")] == ")"
    assert after[call.format("size", "size")] == "    return result"
    assert after[call.format("fold", "Box.fold")] == "        return x"
    assert after[call.format("hold", "Box.hold")] == "        return floor(2.5)"
    assert "not_yet" not in "".join(lines)


def test_the_diff_only_adds_and_git_applies_it(tree: Tree, tmp_path: Path) -> None:
    text = source_patch.diff(tree)
    kinds = {line[:2] for line in text.splitlines() if not line.startswith(("diff", "---", "+++"))}
    assert {kind[0] for kind in kinds} == {"@", "+"}
    added = [line for line in text.splitlines() if line[0] == "+" and line[:3] != "+++"]
    assert added and all(line.endswith(MARK) for line in added)
    (tmp_path / "megatron").mkdir()
    (tmp_path / "megatron" / "toy.py").write_text(SOURCE)
    subprocess.run(["git", "init", "-q", "."], cwd=tmp_path, check=True)
    subprocess.run(["git", "apply", "--unidiff-zero"], cwd=tmp_path, input=text, text=True,
                   check=True)
    assert (tmp_path / "megatron" / "toy.py").read_text() == source_patch.patched(tree)[MODULE]


def test_dropping_the_marked_lines_gives_the_original(tree: Tree) -> None:
    patched = source_patch.patched(tree)[MODULE]
    assert patched != SOURCE
    assert without_patch(patched) == SOURCE


def test_a_patched_tree_gives_the_same_patch(tree: Tree, tmp_path: Path) -> None:
    again = make_tree(tmp_path, source_patch.patched(tree)[MODULE])
    assert source_patch.diff(again) == source_patch.diff(tree)


def test_windows_line_ends_stay(tmp_path: Path) -> None:
    root = tmp_path / "tree"
    make_tree(root, "")
    (root / "megatron" / "toy.py").write_bytes(SOURCE.replace("\n", "\r\n").encode())
    patched = source_patch.patched(Tree(root, SITES, SEAMS))[MODULE]
    assert patched.count("\r\n") == patched.count("\n")
    assert without_patch(patched) == SOURCE.replace("\n", "\r\n")


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("    result = (\n        a\n        * b\n    )\n    return result", "    return a * b"),
        ("            continue\n        for", "            pass; continue\n        for"),
        ("        if iteration // 2 != last and", "        if not log: pass\n"
         "        elif iteration // 2 != last and"),
        ("    log.append(f", "    else:\n        log.append(0)\n    log.append(f"),
    ],
    ids=["return", "continue behind a statement", "elif", "else of a loop"],
)
def test_where_no_statement_has_the_effect_nothing_is_written(
    old: str, new: str, tmp_path: Path
) -> None:
    assert old in SOURCE
    tree = make_tree(tmp_path, SOURCE.replace(old, new))
    with pytest.raises(SiteError, match=r"no statement beside megatron/toy.py:\d+"):
        source_patch.diff(tree)


def test_a_tree_that_does_not_match_is_named(tmp_path: Path) -> None:
    tree = make_tree(tmp_path, SOURCE.replace("a\n        * b", "a + b").replace("ceil,", ""))
    with pytest.raises(SiteError) as caught:
        source_patch.diff(tree)
    message = str(caught.value)
    assert "megatron-core 0.19.2rc1" in message
    assert "size: found 0 times in size, expected 1" in message
    assert "ceil: megatron/toy.py has no ceil" in message
