"""A Megatron-LM source tree, read without importing it."""

from __future__ import annotations

import ast
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from megatron_dynbatch.hooks.registry import SEAMS, SITES
from megatron_dynbatch.hooks.seams import Seam
from megatron_dynbatch.hooks.sites import Site, SiteError, SiteFinder, site_groups

# Ends every line that a source patch inserts.
MARK = "  # megatron_dynbatch"


def without_patch(text: str) -> str:
    """A source file without the lines that a source patch inserted."""
    return "".join(
        line for line in text.splitlines(keepends=True) if not line.rstrip("\r\n").endswith(MARK)
    )


@dataclass
class Module:
    """One source file.

    Attributes:
        name: Dotted name.
        file: Path relative to the tree, with slashes.
        text: What it holds now.
    """

    name: str
    file: str
    text: str
    original: str = field(init=False)
    parsed: ast.Module = field(init=False)

    def __post_init__(self) -> None:
        self.original = without_patch(self.text)
        self.parsed = ast.parse(self.original, self.file)

    def function(self, name: str) -> ast.FunctionDef:
        """A function of the module.

        Raises:
            SiteError: The module has none of that name.
        """
        for node in self.parsed.body:
            if isinstance(node, ast.FunctionDef) and node.name == name:
                return node
        raise SiteError(f"{self.file} has no function {name}")


class Tree:
    """Sites and seams in a tree that holds ``megatron/core``: a checkout or an installed package.

    Source patches in it are looked through: line numbers are those of the unpatched files.

    Args:
        root: Folder that has ``megatron`` in it.
        sites: What to look for.
        seams: What to look for; those of other versions than the tree's are left out.

    Raises:
        ValueError: It is no such folder.
    """

    def __init__(
        self, root: Path, sites: Sequence[Site] = SITES, seams: Sequence[Seam] = SEAMS
    ) -> None:
        self.root = root
        self.sites = sites
        self._modules: dict[str, Module] = {}
        info = root / "megatron" / "core" / "package_info.py"
        if not info.is_file():
            raise ValueError(
                f"{root} is not a Megatron-LM tree: it has no megatron/core/package_info.py; name "
                "the folder that contains megatron/"
            )
        numbers = _assigned(ast.parse(info.read_text(encoding="utf-8")))
        self.version = tuple(int(str(numbers[name])) for name in ("MAJOR", "MINOR", "PATCH"))
        self.seams = [seam for seam in seams if self.version[:2] >= seam.since]
        self.label = ".".join(map(str, self.version)) + str(numbers.get("PRE_RELEASE", ""))

    def module(self, name: str) -> Module:
        """A module of the tree.

        Raises:
            SiteError: It is not there.
        """
        if name not in self._modules:
            file = name.replace(".", "/") + ".py"
            path = self.root / file
            if not path.is_file():
                raise SiteError(f"{self.root} has no {file}")
            # Line ends stay as they are.
            with path.open(encoding="utf-8", newline="") as stream:
                self._modules[name] = Module(name, file, stream.read())
        return self._modules[name]

    def find_sites(self) -> list[TreeSite]:
        """Every site with the expressions that were found."""
        found = []
        for (module, function), group in site_groups(self.sites).items():
            try:
                source = self.module(module)
                definition = source.function(function)
            except SiteError as error:
                found += [TreeSite(site, None, None, (), str(error)) for site in group]
                continue
            finder = SiteFinder(group)
            finder.generic_visit(definition)
            found += [
                TreeSite(site, source, definition, tuple(finder.found[site.name]),
                         finder.problem(site))
                for site in group
            ]
        return found

    def find_seams(self) -> list[TreeSeam]:
        """Every seam with the statement that binds its name."""
        found = []
        for seam in self.seams:
            try:
                source = self.module(seam.module)
                found.append(TreeSeam(seam, source, binding(source, seam.attribute), None))
            except SiteError as error:
                found.append(TreeSeam(seam, None, None, str(error)))
        return found

    def problems(self) -> list[str]:
        """What does not match, one line each."""
        return [
            *(f"{s.site.name}: {s.problem}" for s in self.find_sites() if s.problem),
            *(f"{s.seam.attribute}: {s.problem}" for s in self.find_seams() if s.problem),
        ]


@dataclass(frozen=True)
class TreeSite:
    """One site in a tree: its expressions, and what is wrong with their number, if anything."""

    site: Site
    module: Module | None
    function: ast.FunctionDef | None
    nodes: tuple[ast.expr, ...]
    problem: str | None


@dataclass(frozen=True)
class TreeSeam:
    """One seam in a tree: the statement that binds its name."""

    seam: Seam
    module: Module | None
    statement: ast.stmt | None
    problem: str | None


def binding(module: Module, attribute: str) -> ast.stmt:
    """The last statement that binds ``name`` in a module, or ``Class.name`` in a class body.

    Raises:
        SiteError: There is none at the top level.
    """
    body, (*classes, name) = module.parsed.body, attribute.split(".")
    for class_name in classes:
        matching = [n for n in body if isinstance(n, ast.ClassDef) and n.name == class_name]
        if not matching:
            raise SiteError(f"{module.file} has no class {class_name}")
        body = matching[-1].body
    for node in reversed(body):
        if name in _bound(node):
            return node
    raise SiteError(f"{module.file} has no {attribute}")


def _bound(node: ast.stmt) -> set[str]:
    if isinstance(node, ast.FunctionDef):
        return {node.name}
    if isinstance(node, ast.Import | ast.ImportFrom):
        return {alias.asname or alias.name for alias in node.names}
    return set()


def _assigned(module: ast.Module) -> dict[str, object]:
    return {
        node.targets[0].id: node.value.value
        for node in module.body
        if isinstance(node, ast.Assign)
        and isinstance(node.targets[0], ast.Name)
        and isinstance(node.value, ast.Constant)
    }
