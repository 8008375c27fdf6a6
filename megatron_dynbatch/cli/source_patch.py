"""Source patches: the hook calls as statements inserted beside each site and seam.

Nothing of Megatron is changed or quoted: a patch only adds lines, each of which ends with a mark,
so that dropping the marked lines gives the original back.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass

from megatron_dynbatch.cli.tree import MARK, Module, Tree, TreeSeam, TreeSite
from megatron_dynbatch.hooks.sites import PATCHED_CALL, SiteError

_SEAM_CALL = "dynbatch_seam"


@dataclass(frozen=True)
class Insertion:
    """Lines to add behind line ``after`` of a file; 0 is its top."""

    after: int
    lines: tuple[str, ...]


def insertions(tree: Tree) -> dict[str, list[Insertion]]:
    """What to insert into each module, in source order.

    Raises:
        SiteError: The tree does not match the registry, or no statement beside a site has the
            effect of its hook.
    """
    if problems := tree.problems():
        listed = "\n".join(f"  {line}" for line in problems)
        raise SiteError(f"{tree.root} (megatron-core {tree.label}) does not match:\n{listed}")
    added: dict[str, list[Insertion]] = {}
    for site in tree.find_sites():
        assert site.module is not None
        added.setdefault(site.module.name, []).extend(_at_site(site))
    for seam in tree.find_seams():
        assert seam.module is not None
        added.setdefault(seam.module.name, []).append(_at_seam(seam))
    for name, found in added.items():
        found.append(_import(tree.module(name), found))
        found.sort(key=lambda insertion: insertion.after)
    return added


def patched(tree: Tree) -> dict[str, str]:
    """The patched text of each module that is touched."""
    return {
        name: _insert(tree.module(name).original, found)
        for name, found in insertions(tree).items()
    }


def diff(tree: Tree) -> str:
    """A unified diff without context, for ``git apply --unidiff-zero``."""
    parts = []
    for name, found in sorted(insertions(tree).items()):
        file = tree.module(name).file
        parts.append(f"diff --git a/{file} b/{file}\n--- a/{file}\n+++ b/{file}\n")
        shift = 0
        for insertion in _merged(found):
            count = len(insertion.lines)
            parts.append(f"@@ -{insertion.after},0 +{insertion.after + shift + 1},{count} @@\n")
            parts += [f"+{line}{MARK}\n" for line in insertion.lines]
            shift += count
    return "".join(parts)


def _merged(found: list[Insertion]) -> Iterator[Insertion]:
    for after in dict.fromkeys(insertion.after for insertion in found):
        yield Insertion(after, tuple(line for i in found if i.after == after for line in i.lines))


def _insert(text: str, found: list[Insertion]) -> str:
    lines = text.splitlines(keepends=True)
    end = "\r\n" if lines and lines[0].endswith("\r\n") else "\n"
    for insertion in reversed(list(_merged(found))):
        lines[insertion.after : insertion.after] = [
            line + MARK + end for line in insertion.lines
        ]
    return "".join(lines)


def _import(module: Module, found: list[Insertion]) -> Insertion:
    """The import of what the other lines call, before the module's first import."""
    text = "\n".join(line for insertion in found for line in insertion.lines)
    names = ", ".join(name for name in (_SEAM_CALL, PATCHED_CALL) if f"{name}(" in text)
    first = next(
        node
        for node in module.parsed.body
        if isinstance(node, ast.Import | ast.ImportFrom)
        and getattr(node, "module", None) != "__future__"
    )
    return Insertion(first.lineno - 1, (f"from megatron_dynbatch.patched import {names}",))


def _at_seam(found: TreeSeam) -> Insertion:
    statement, seam = found.statement, found.seam
    assert statement is not None and statement.end_lineno is not None
    name = seam.attribute.rpartition(".")[2]
    line = f"{' ' * statement.col_offset}{name} = {_SEAM_CALL}({seam.key!r}, {name})"
    return Insertion(statement.end_lineno, (line,))


def _at_site(found: TreeSite) -> Iterator[Insertion]:
    assert found.function is not None
    for node in found.nodes:
        statement = _statement_of(node, found.function)
        if isinstance(statement, ast.Assign) and statement.value is node:
            yield _after_assignment(found, statement)
        elif isinstance(statement, ast.While) and statement.test is node:
            yield from _around_loop(found, statement)
        elif isinstance(statement, ast.If) and isinstance(node, ast.Compare):
            yield _before_comparison(found, statement, node)
        else:
            raise _no_statement(found, node)


def _no_statement(found: TreeSite, node: ast.AST) -> SiteError:
    file = found.module.file if found.module else "?"
    return SiteError(
        f"{found.site.name}: no statement beside {file}:{getattr(node, 'lineno', '?')} has the "
        "effect of its hook; use install() with this Megatron"
    )


def _statement_of(node: ast.expr, function: ast.FunctionDef) -> ast.stmt:
    """The innermost statement that holds an expression."""
    holder: ast.stmt = function
    for statement in ast.walk(function):
        # ast.walk goes from the outside inwards.
        if isinstance(statement, ast.stmt) and any(inner is node for inner in ast.walk(statement)):
            holder = statement
    return holder


def _call(found: TreeSite, value: str) -> str:
    return f"{PATCHED_CALL}({found.site.name!r}, {value}, locals())"


def _after_assignment(found: TreeSite, statement: ast.Assign) -> Insertion:
    """``x = product`` is followed by ``x = site(x)``."""
    if len(statement.targets) != 1 or statement.end_lineno is None:
        raise _no_statement(found, statement)
    target = ast.unparse(statement.targets[0])
    line = f"{' ' * statement.col_offset}{target} = {_call(found, target)}"
    return Insertion(statement.end_lineno, (line,))


def _before_comparison(found: TreeSite, statement: ast.If, node: ast.Compare) -> Insertion:
    """Where the hook says that ``new != old`` does not hold, ``old`` becomes ``new`` first.

    Only for hooks that turn True into False, as that of the micro-batch count does.
    """
    line = _line(found, statement.lineno)
    old = node.comparators[-1]
    if not line.startswith("if ") or not isinstance(old, ast.Name) or len(node.ops) != 1:
        raise _no_statement(found, node)
    if not isinstance(node.ops[0], ast.NotEq):
        raise _no_statement(found, node)
    indent = " " * statement.col_offset
    return Insertion(
        statement.lineno - 1,
        (
            f"{indent}if not {_call(found, ast.unparse(node))}:",
            f"{indent}    {old.id} = {ast.unparse(node.left)}",
        ),
    )


def _around_loop(found: TreeSite, loop: ast.While) -> Iterator[Insertion]:
    """The hook decides at the start of the body; ``while count < limit`` itself always holds.

    For that the counter is put aside, and -1 stands in its place, from the end of each pass until
    the next one has begun; nothing else runs in between.
    """
    test, first, last = loop.test, loop.body[0], loop.body[-1]
    if (
        not isinstance(test, ast.Compare)
        or not isinstance(test.left, ast.Name)
        or not isinstance(test.ops[0], ast.Lt)
        or loop.orelse
        or test.end_lineno is None
        or last.end_lineno is None
    ):
        raise _no_statement(found, test)
    counter, kept = test.left.id, f"dynbatch_{test.left.id}"
    put_aside = f"{kept}, {counter} = {counter}, -1"
    indent = " " * first.col_offset
    yield Insertion(loop.lineno - 1, (" " * loop.col_offset + put_aside,))
    yield Insertion(
        test.end_lineno,
        (
            f"{indent}{counter} = {kept}",
            f"{indent}if not {_call(found, ast.unparse(test))}:",
            f"{indent}    break",
        ),
    )
    for statement in _continues(loop):
        if not _line(found, statement.lineno).startswith("continue"):
            raise _no_statement(found, statement)
        yield Insertion(statement.lineno - 1, (" " * statement.col_offset + put_aside,))
    yield Insertion(last.end_lineno, (indent + put_aside,))


def _continues(loop: ast.While) -> Iterator[ast.Continue]:
    """The ``continue`` statements of this loop, not those of loops or functions inside it."""
    waiting: list[ast.AST] = list(loop.body)
    while waiting:
        node = waiting.pop(0)
        if isinstance(node, ast.Continue):
            yield node
        if isinstance(node, ast.For | ast.While):
            waiting += node.orelse
        elif not isinstance(node, ast.FunctionDef | ast.ClassDef | ast.Lambda):
            waiting += ast.iter_child_nodes(node)


def _line(found: TreeSite, number: int) -> str:
    assert found.module is not None
    return found.module.original.splitlines()[number - 1].strip()
