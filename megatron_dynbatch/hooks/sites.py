"""Named sites: single expressions inside Megatron's functions whose value we may replace.

A site is found in the function's source by its shape, wrapped as
``__dynbatch_sites__[name](expression, locals())``, recompiled with file name and line numbers kept,
and put in place by swapping ``function.__code__``. Names bound early (``from ... import
train_step``), identity and tracebacks therefore survive, and the original code object is all that
is needed to undo it. A count of matches other than expected is how a changed Megatron is noticed.

A function whose source carries the statements of `megatron_dynbatch.patched` is left as it is.
"""

from __future__ import annotations
import __future__

import ast
import functools
import importlib
import inspect
import linecache
import textwrap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import CodeType, FunctionType
from typing import Any

from megatron_dynbatch.errors import DynbatchError
from megatron_dynbatch.hooks.foreign import describe, find_behind

SITES_NAME = "__dynbatch_sites__"
# What a source patch calls; see `megatron_dynbatch.patched`.
PATCHED_CALL = "dynbatch_site"

Handler = Callable[[Any, Mapping[str, Any]], Any]


class SiteError(DynbatchError, RuntimeError):
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
        why: What goes wrong with the expression's own value.
        until: What Megatron would have to offer to make this unnecessary, with a link if it is
            being discussed.
    """

    name: str
    module: str
    function: str
    matches: Callable[[ast.expr], bool]
    counts: tuple[int, ...]
    handler: Handler
    why: str = ""
    until: str = ""


@dataclass(frozen=True, slots=True)
class SiteReport:
    """What was found for one site.

    Attributes:
        site: Which one.
        file: Source file of its function, "?" if unknown.
        lines: Lines of its matches.
        patched: Whether the source carries our statements beside all of them.
        wrapped_by: Who stands around the function, if somebody does.
        problem: What is wrong, if anything.
    """

    site: Site
    file: str
    lines: tuple[int, ...]
    patched: bool
    wrapped_by: str | None
    problem: str | None


class SiteFinder(ast.NodeTransformer):
    """Finds each matching expression of one function; the outermost match wins.

    Args:
        sites: Those of this function.
        wrap: Whether matches are replaced by calls of their handlers.

    Attributes:
        found: The expressions by site name, in source order.
        patched: Number of source-patch calls by site name.
    """

    def __init__(self, sites: Sequence[Site], wrap: bool = False) -> None:
        self.sites = sites
        self.wrap = wrap
        self.found: dict[str, list[ast.expr]] = {site.name: [] for site in sites}
        self.patched: dict[str, int] = {}

    def visit(self, node: ast.AST) -> ast.AST:
        if isinstance(node, ast.Call) and ast.unparse(node.func) == PATCHED_CALL:
            name = ast.literal_eval(node.args[0])
            self.patched[name] = self.patched.get(name, 0) + 1
            return node
        if isinstance(node, ast.expr):
            for site in self.sites:
                if site.matches(node):
                    self.found[site.name].append(node)
                    return self._wrapped(site, node) if self.wrap else node
        return self.generic_visit(node)

    @staticmethod
    def _wrapped(site: Site, node: ast.expr) -> ast.expr:
        handler = ast.Subscript(
            ast.Name(SITES_NAME, ast.Load()), ast.Constant(site.name), ast.Load()
        )
        frame = ast.Call(ast.Name("locals", ast.Load()), [], [])
        call = ast.copy_location(ast.Call(handler, [node, frame], []), node)
        return ast.fix_missing_locations(call)

    def problem(self, site: Site) -> str | None:
        """What is wrong with a site's number of matches, if anything."""
        found, patched = len(self.found[site.name]), self.patched.get(site.name, 0)
        if found not in site.counts:
            expected = " or ".join(map(str, site.counts))
            return f"found {found} times in {site.function}, expected {expected}"
        if self.patched and patched != found:
            return (
                f"the source patch covers {patched} of {found} places in {site.function}: it was "
                "made by another version of the plugin; run `megatron-dynbatch patch` with "
                "--revert, then with --apply"
            )
        return None


def site_groups(sites: Sequence[Site]) -> dict[tuple[str, str], list[Site]]:
    """The sites by (module, function)."""
    groups: dict[tuple[str, str], list[Site]] = {}
    for site in sites:
        groups.setdefault((site.module, site.function), []).append(site)
    return groups


def find_function(module: str, function: str) -> FunctionType:
    """Return the function that ``module`` defined, behind whatever was put around it.

    Raises:
        SiteError: It is missing, or somebody put something in its place that does not call it.
    """
    home = importlib.import_module(module)
    target = getattr(home, function, None)
    if target is None:
        raise SiteError(f"{module} has no function {function}; this Megatron is not supported")

    def is_original(found: Any) -> bool:
        return (
            isinstance(found, FunctionType)
            and found.__globals__ is vars(home)
            and found.__qualname__ == function
        )

    original = find_behind(target, is_original)
    if original is None:
        raise SiteError(
            f"{module}.{function} was replaced by {describe(target)}, which does not call the "
            "original: the plugin cannot work with it; let it wrap the original, or remove it"
        )
    return original


@functools.cache
def _source(code: CodeType) -> tuple[str, int]:
    lines, first = inspect.getsourcelines(code)
    return textwrap.dedent("".join(lines)), first


def _parse(function: FunctionType, code: CodeType) -> ast.Module:
    source, first_line = _source(code)
    tree = ast.parse(source)
    definition = tree.body[0]
    if not isinstance(definition, ast.FunctionDef):
        raise SiteError(f"{function.__qualname__} is not an ordinary function definition")
    definition.decorator_list = []  # a decorator has already done its work
    ast.increment_lineno(tree, first_line - 1)
    return tree


def _compile(tree: ast.Module, function: FunctionType, code: CodeType) -> CodeType:
    """The function's code object, compiled under the module's own future flags."""
    future = code.co_flags & __future__.annotations.compiler_flag
    module_code = compile(tree, code.co_filename, "exec", flags=future, dont_inherit=True)
    new = next(
        c for c in module_code.co_consts if isinstance(c, CodeType) and c.co_name == code.co_name
    )
    if new.co_freevars != code.co_freevars:
        raise SiteError(f"{function.__qualname__} closes over {code.co_freevars}")
    return new


def _code_in_file(code: CodeType) -> CodeType | None:
    """The code object that the source file gives the same function now."""
    linecache.checkcache(code.co_filename)
    source = "".join(linecache.getlines(code.co_filename))
    for found in _module_constants(source, code.co_filename):
        if isinstance(found, CodeType) and found.co_name == code.co_name:
            if found.co_firstlineno == code.co_firstlineno:
                return found
    return None


@functools.cache
def _module_constants(source: str, filename: str) -> tuple[Any, ...]:
    # The whole module, because what it imports decides on the byte code of calls.
    return compile(source, filename, "exec", dont_inherit=True).co_consts


@dataclass(frozen=True, slots=True)
class _Swap:
    original: CodeType
    ours: CodeType


# What stands in place of the original code objects.
_INSTALLED: dict[FunctionType, _Swap] = {}


def _original_code(function: FunctionType) -> CodeType:
    """The code that Megatron's source stands for.

    Raises:
        SiteError: Somebody else rewrote the function at run time.
    """
    swap = _INSTALLED.get(function)
    code = function.__code__
    if swap is not None and code is swap.ours:
        return swap.original
    if _code_in_file(code) != code:
        raise SiteError(
            f"{function.__module__}.{function.__qualname__} no longer runs the source in "
            f"{code.co_filename}: another plugin rewrote it, or the file changed after it was "
            "imported; remove that plugin, or install this one before it"
        )
    return code


def _report_group(module: str, name: str, group: Sequence[Site]) -> list[SiteReport]:
    try:
        function = find_function(module, name)
        code = _original_code(function)
        finder = SiteFinder(group)
        finder.visit(_parse(function, code))
    except (SiteError, ImportError, OSError, SyntaxError) as error:
        return [SiteReport(site, "?", (), False, None, str(error)) for site in group]
    target = getattr(importlib.import_module(module), name)
    wrapped_by = None if target is function else describe(target)
    return [
        SiteReport(
            site,
            code.co_filename,
            tuple(node.lineno for node in finder.found[site.name]),
            bool(finder.patched),
            wrapped_by,
            finder.problem(site),
        )
        for site in group
    ]


def inspect_sites(sites: Sequence[Site]) -> list[SiteReport]:
    """Look for every site in the installed Megatron; changes nothing."""
    reports = []
    for (module, name), group in site_groups(sites).items():
        reports += _report_group(module, name, group)
    return reports


def install_sites(sites: Sequence[Site]) -> None:
    """Put all sites in place, or none.

    Raises:
        SiteError: Names each site that does not match, what was found, and where.
    """
    reports = inspect_sites(sites)
    problems = [r for r in reports if r.problem]
    if problems:
        listed = "\n".join(f"  {r.site.name}: {r.problem} ({r.file})" for r in problems)
        raise SiteError(
            f"this Megatron does not match:\n{listed}\n"
            "nothing was changed; see the supported versions in README.md, and "
            "`megatron-dynbatch doctor` for the whole table"
        )
    swaps = []
    for (module, name), group in site_groups([r.site for r in reports if not r.patched]).items():
        function = find_function(module, name)
        code = function.__code__
        if function not in _INSTALLED or code is not _INSTALLED[function].ours:
            tree = _parse(function, code)
            SiteFinder(group, wrap=True).visit(tree)
            swaps.append((function, _Swap(code, _compile(tree, function, code)), group))
    for function, swap, group in swaps:
        handlers = function.__globals__.setdefault(SITES_NAME, {})
        handlers.update({site.name: site.handler for site in group})
        _INSTALLED[function] = swap
        function.__code__ = swap.ours


def sites_out_of_place(sites: Sequence[Site]) -> list[str]:
    """What happened to sites since they were installed, one line each; empty if nothing did."""
    lines = []
    for (module, name), group in site_groups(sites).items():
        try:
            function = find_function(module, name)
        except SiteError as error:
            lines.append(str(error))
            continue
        swap = _INSTALLED.get(function)
        if swap is not None and function.__code__ is swap.ours:
            continue
        if all(report.patched for report in _report_group(module, name, group)):
            continue
        lines.append(
            f"{module}.{name} is not the function that was hooked: its module was loaded again, "
            "or another plugin rewrote it"
        )
    return lines


def uninstall_sites() -> None:
    """Put every original code object back, except where somebody else swapped it after us."""
    ours = {function for function, swap in _INSTALLED.items() if function.__code__ is swap.ours}
    for function in ours:
        function.__code__ = _INSTALLED[function].original
    for function in ours:
        # Code that was built on ours still calls the handlers; they do nothing without a run.
        if all(f in ours for f in _INSTALLED if f.__globals__ is function.__globals__):
            function.__globals__.pop(SITES_NAME, None)
    _INSTALLED.clear()
