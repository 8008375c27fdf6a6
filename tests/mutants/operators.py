"""Small faults in a Python file, each at one place of its syntax tree.

Messages of errors, docstrings, annotations and decorators are left alone: what they say is the
business of other tests.
"""

from __future__ import annotations

import ast
import copy
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass

_COMPARISONS: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq, ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In,
}  # fmt: skip
_ARITHMETIC: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.FloorDiv, ast.Div: ast.Mult,
    ast.FloorDiv: ast.Mult, ast.Mod: ast.FloorDiv, ast.BitAnd: ast.BitOr, ast.BitOr: ast.BitAnd,
}  # fmt: skip


@dataclass(frozen=True)
class Mutant:
    """One fault.

    Attributes:
        file: Path inside the package.
        line: Where it is, for readers.
        key: What it is, without line numbers: file, function, expression → expression.
        source: The whole file with the fault.
    """

    file: str
    line: int
    key: str
    source: str


def mutants_of(file: str, source: str) -> list[Mutant]:
    """All faults of one file, in its order.

    Args:
        file: Path inside the package.
        source: Its text.
    """
    tree = ast.parse(source)
    found, seen = [], Counter[str]()
    for place, (node, owner) in enumerate(_places(tree)):
        for number in range(len(list(_changes(node)))):
            copied = copy.deepcopy(tree)
            twin = list(_places(copied))[place][0]
            before = _shown(node)
            replaced = list(_changes(twin))[number](twin)
            _replace(copied, twin, replaced)
            key = f"{file} {owner}: {before} → {_shown(replaced)}"
            seen[key] += 1
            if seen[key] > 1:
                key += f" ({seen[key]})"
            text = ast.unparse(ast.fix_missing_locations(copied))
            found.append(Mutant(file, getattr(node, "lineno", 0), key, text))
    return found


def _shown(node: ast.AST) -> str:
    if isinstance(node, (ast.If, ast.While)):
        return f"{type(node).__name__.lower()} {ast.unparse(node.test)}"
    return " ".join(ast.unparse(node).split()) if not isinstance(node, ast.Pass) else "nothing"


def _replace(tree: ast.AST, old: ast.AST, new: ast.AST) -> None:
    if new is old:
        return
    for parent in ast.walk(tree):
        for name, value in ast.iter_fields(parent):
            if value is old:
                setattr(parent, name, new)
            elif isinstance(value, list):
                value[:] = [new if item is old else item for item in value]


def _places(tree: ast.Module) -> Iterator[tuple[ast.AST, str]]:
    """Every node that may be changed, and the function or class around it."""
    yield from _inside(tree, "module")


def _inside(node: ast.AST, owner: str) -> Iterator[tuple[ast.AST, str]]:
    if isinstance(node, (ast.Raise, ast.JoinedStr, ast.Import, ast.ImportFrom)):
        return
    if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
        return
    if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
        owner = node.name if owner == "module" else f"{owner}.{node.name}"
    yield node, owner
    for name, value in ast.iter_fields(node):
        if name in ("annotation", "returns", "decorator_list", "type_params", "msg"):
            continue
        if isinstance(node, ast.Assert):
            continue  # an invariant of ours, not a way the program takes
        for child in value if isinstance(value, list) else [value]:
            if isinstance(child, ast.AST):
                yield from _inside(child, owner)


Change = Callable[[ast.AST], ast.AST]


def _changes(node: ast.AST) -> Iterator[Change]:
    """Ways to break a node; each changes it in place or answers another one."""
    if isinstance(node, ast.Compare) and type(node.ops[0]) in _COMPARISONS:
        yield _other_comparison
    elif isinstance(node, ast.BinOp) and type(node.op) in _ARITHMETIC:
        yield _other_arithmetic
    elif isinstance(node, ast.AugAssign) and type(node.op) in _ARITHMETIC:
        yield _other_arithmetic
    elif isinstance(node, ast.BoolOp):
        yield _other_connection
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, (ast.Not, ast.Invert, ast.USub)):
        yield lambda n: n.operand  # type: ignore[attr-defined]
    elif isinstance(node, ast.IfExp):
        yield _other_branch
    elif isinstance(node, ast.Constant) and type(node.value) in (bool, int, float):
        yield _other_number
    elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
        yield lambda n: ast.Pass()
    elif isinstance(node, (ast.If, ast.While)) and isinstance(
        node.test, (ast.Name, ast.Attribute, ast.Call)
    ):
        yield _other_condition


def _other_comparison(node: ast.AST) -> ast.AST:
    assert isinstance(node, ast.Compare)
    node.ops[0] = _COMPARISONS[type(node.ops[0])]()
    return node


def _other_arithmetic(node: ast.AST) -> ast.AST:
    assert isinstance(node, (ast.BinOp, ast.AugAssign))
    node.op = _ARITHMETIC[type(node.op)]()
    return node


def _other_connection(node: ast.AST) -> ast.AST:
    assert isinstance(node, ast.BoolOp)
    node.op = ast.Or() if isinstance(node.op, ast.And) else ast.And()
    return node


def _other_branch(node: ast.AST) -> ast.AST:
    assert isinstance(node, ast.IfExp)
    node.body, node.orelse = node.orelse, node.body
    return node


def _other_number(node: ast.AST) -> ast.AST:
    assert isinstance(node, ast.Constant) and isinstance(node.value, (bool, int, float))
    node.value = not node.value if isinstance(node.value, bool) else node.value + 1
    return node


def _other_condition(node: ast.AST) -> ast.AST:
    assert isinstance(node, (ast.If, ast.While))
    node.test = ast.UnaryOp(ast.Not(), node.test)
    return node
