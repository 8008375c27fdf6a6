"""Named sites: single expressions inside Megatron's functions whose value we may replace.

A site is found in the function's source by its shape, wrapped as
``__dynbatch_sites__[name](expression, locals())``, recompiled with file name and line numbers kept,
and put in place by swapping ``function.__code__``. Names bound early (``from ... import
train_step``), identity and tracebacks therefore survive, and the original code object is all that
is needed to undo it. A count of matches other than expected is how a changed Megatron is noticed.
"""

from __future__ import annotations
import __future__

import ast
import functools
import importlib
import inspect
import textwrap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import CodeType, FunctionType
from typing import Any

SITES_NAME = "__dynbatch_sites__"

Handler = Callable[[Any, Mapping[str, Any]], Any]


class SiteError(RuntimeError):
    """A site does not look as expected in the Megatron that is installed."""


@dataclass(frozen=True, slots=True)
class Site:
    """One kind of expression in one function of Megatron.

    Attributes:
        name: What it is called in errors and by ``megatron-dynbatch doctor``.
        module: Module that defines the function.
        function: Name of the function.
        matches: Tells whether an AST node is this expression.
        counts: Numbers of matches that are known to be right.
        handler: Called with the expression's value and the frame's locals; its answer is
            used instead.
    """

    name: str
    module: str
    function: str
    matches: Callable[[ast.expr], bool]
    counts: tuple[int, ...]
    handler: Handler


@dataclass(frozen=True, slots=True)
class SiteReport:
    """What was found for one site: its lines in ``file``, and what is wrong, if anything."""

    site: Site
    file: str
    lines: tuple[int, ...]
    problem: str | None


class _Wrapper(ast.NodeTransformer):
    """Wraps each matching expression; the outermost match wins."""

    def __init__(self, sites: Sequence[Site]) -> None:
        self.sites = sites
        self.lines: dict[str, list[int]] = {site.name: [] for site in sites}

    def visit(self, node: ast.AST) -> ast.AST:
        if isinstance(node, ast.expr):
            for site in self.sites:
                if site.matches(node):
                    self.lines[site.name].append(node.lineno)
                    return self._wrapped(site, node)
        return self.generic_visit(node)

    @staticmethod
    def _wrapped(site: Site, node: ast.expr) -> ast.expr:
        handler = ast.Subscript(
            ast.Name(SITES_NAME, ast.Load()), ast.Constant(site.name), ast.Load()
        )
        frame = ast.Call(ast.Name("locals", ast.Load()), [], [])
        call = ast.copy_location(ast.Call(handler, [node, frame], []), node)
        return ast.fix_missing_locations(call)


def find_function(module: str, function: str) -> FunctionType:
    """Return the Python function behind all wrappers that declare what they wrap.

    Raises:
        SiteError: It is missing, or somebody put something else than a function in its place.
    """
    target = getattr(importlib.import_module(module), function, None)
    if target is None:
        raise SiteError(f"{module} has no function {function}; this Megatron is not supported")
    inner = inspect.unwrap(target)
    if not isinstance(inner, FunctionType):
        raise SiteError(f"{module}.{function} is a {type(inner).__name__}, not a function")
    return inner


@functools.cache
def _source(code: CodeType) -> tuple[str, int]:
    lines, first = inspect.getsourcelines(code)
    return textwrap.dedent("".join(lines)), first


def _rewrite(function: FunctionType, code: CodeType, sites: Sequence[Site]) -> _Rewritten:
    source, first_line = _source(code)
    tree = ast.parse(source)
    definition = tree.body[0]
    if not isinstance(definition, ast.FunctionDef):
        raise SiteError(f"{function.__qualname__} is not an ordinary function definition")
    definition.decorator_list = []  # a decorator has already done its work
    ast.increment_lineno(tree, first_line - 1)
    wrapper = _Wrapper(sites)
    wrapper.generic_visit(tree)
    return _Rewritten(tree, wrapper.lines)


@dataclass(frozen=True, slots=True)
class _Rewritten:
    tree: ast.Module
    lines: dict[str, list[int]]

    def compile(self, function: FunctionType, code: CodeType) -> CodeType:
        """Compile under the module's own future flags and return the function's code object."""
        future = code.co_flags & __future__.annotations.compiler_flag
        module_code = compile(
            self.tree, code.co_filename, "exec", flags=future, dont_inherit=True
        )
        new = next(c for c in module_code.co_consts if isinstance(c, CodeType)
                   and c.co_name == code.co_name)
        if new.co_freevars != code.co_freevars:
            raise SiteError(f"{function.__qualname__} closes over {code.co_freevars}")
        return new


def _by_function(sites: Sequence[Site]) -> dict[tuple[str, str], list[Site]]:
    groups: dict[tuple[str, str], list[Site]] = {}
    for site in sites:
        groups.setdefault((site.module, site.function), []).append(site)
    return groups


def inspect_sites(sites: Sequence[Site]) -> list[SiteReport]:
    """Look for every site in the installed Megatron; changes nothing."""
    reports = []
    for (module, name), group in _by_function(sites).items():
        try:
            function = find_function(module, name)
            code = _ORIGINALS.get(function, function.__code__)
            lines = _rewrite(function, code, group).lines
            file = code.co_filename
        except (SiteError, ImportError, OSError, SyntaxError) as error:
            reports += [SiteReport(site, "?", (), str(error)) for site in group]
            continue
        for site in group:
            found = lines[site.name]
            problem = None
            if len(found) not in site.counts:
                expected = " or ".join(map(str, site.counts))
                problem = f"found {len(found)} times in {name}, expected {expected}"
            reports.append(SiteReport(site, file, tuple(found), problem))
    return reports


# The code objects that stood in place before ours.
_ORIGINALS: dict[FunctionType, CodeType] = {}


def install_sites(sites: Sequence[Site]) -> None:
    """Put all sites in place, or none.

    Raises:
        SiteError: Names each site that does not match, what was found, and where.
    """
    problems = [r for r in inspect_sites(sites) if r.problem]
    if problems:
        listed = "\n".join(f"  {r.site.name}: {r.problem} ({r.file})" for r in problems)
        raise SiteError(
            f"this Megatron does not match:\n{listed}\n"
            "nothing was changed; see the supported versions in README.md, and "
            "`megatron-dynbatch doctor` for the whole table"
        )
    swaps = []
    for (module, name), group in _by_function(sites).items():
        function = find_function(module, name)
        if function not in _ORIGINALS:
            code = function.__code__
            new = _rewrite(function, code, group).compile(function, code)
            swaps.append((function, code, new, group))
    for function, code, new, group in swaps:
        handlers = function.__globals__.setdefault(SITES_NAME, {})
        handlers.update({site.name: site.handler for site in group})
        _ORIGINALS[function] = code
        function.__code__ = new


def uninstall_sites() -> None:
    """Put every original code object back."""
    for function, code in _ORIGINALS.items():
        function.__code__ = code
        function.__globals__.pop(SITES_NAME, None)
    _ORIGINALS.clear()
