"""Which modules of the package hold on to a mutated one, and must be imported anew with it."""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterator
from pathlib import Path


def module_name(path: Path) -> str:
    """Of a file inside the tree: ``package/part/__init__.py`` is ``package.part``."""
    parts = path.with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


@functools.cache
def dependents(tree: Path, package: str, file: str) -> frozenset[str]:
    """The module of a file, and all that import it at their top level, directly or not.

    An import inside a function does not count: it looks the module up when it runs.

    Args:
        tree: The folder that holds the package.
        package: Its name.
        file: Path inside the package.
    """
    imported = {
        module_name(path.relative_to(tree)): set(_imported(path))
        for path in (tree / package).rglob("*.py")
    }
    found = {module_name(Path(package) / file)}
    while more := {name for name, of in imported.items() if of & found} - found:
        found |= more
    return frozenset(found)


def _imported(path: Path) -> Iterator[str]:
    """Every module that the top level of a file may import, with the packages around it."""
    for name in _names(ast.parse(path.read_text(encoding="utf-8"))):
        parts = name.split(".")
        for size in range(1, len(parts) + 1):
            yield ".".join(parts[:size])


def _names(node: ast.AST) -> Iterator[str]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Import):
            yield from (alias.name for alias in child.names)
        elif isinstance(child, ast.ImportFrom):
            assert child.module is not None and not child.level, "relative imports are not followed"
            # What is imported from a package may be a module.
            yield from (f"{child.module}.{alias.name}" for alias in child.names)
        elif isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test):
            continue
        elif not isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)):
            yield from _names(child)
