"""``megatron-dynbatch sites``: which sites and seams moved in a Megatron-LM tree; for maintainers.

Reads source only, so that any checkout can be looked at, also one that cannot run here.
"""

from __future__ import annotations

import argparse
import ast
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from megatron_dynbatch.cli.tree import Tree, TreeSite

DESCRIPTION = """\
Looks for every site and seam in the source of a Megatron-LM tree and compares it with another one
(the installed Megatron unless --against names a tree). Exit code 1 if something does not match.
"""
EXAMPLES = """\
  megatron-dynbatch sites Megatron-LM
  megatron-dynbatch sites Megatron-LM-main --against Megatron-LM-core_v0.19.0"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of the subcommand."""
    parser.add_argument("tree", type=Path, help="folder that contains megatron/")
    parser.add_argument("--against", type=Path, metavar="TREE", help="tree to compare with")


def run(args: argparse.Namespace) -> int:
    """Print one line per site and seam."""
    from megatron_dynbatch.cli.tree import Tree  # imports torch, for which help must not wait

    tree = Tree(args.tree)
    root = args.against or installed_root()
    other = Tree(root) if root is not None else None
    print(f"{tree.root}: megatron-core {tree.label}")
    if other is not None:
        print(f"compared with {other.root}: megatron-core {other.label}")
    print()
    for line in compare(tree, other):
        print(line)
    problems = tree.problems()
    print(f"\n{len(problems)} of {len(tree.find_sites()) + len(tree.find_seams())} do not match")
    return 1 if problems else 0


def installed_root() -> Path | None:
    """Folder that contains the installed ``megatron``; None without one."""
    if find_spec("megatron") is None:
        return None
    spec = find_spec("megatron.core")
    return None if spec is None or spec.origin is None else Path(spec.origin).parents[2]


def compare(tree: Tree, other: Tree | None) -> list[str]:
    """What became of each site and seam since ``other``, one line each."""
    lines = []
    before = {found.site.name: found for found in other.find_sites()} if other else {}
    for found in tree.find_sites():
        state = found.problem or _moved(found, before.get(found.site.name))
        lines.append(f"{found.site.name:<34} {_place(found):<44} {state}")
    for seam in tree.find_seams():
        place = "" if seam.module is None or seam.statement is None else (
            f"{seam.module.file}:{seam.statement.lineno}"
        )
        lines.append(f"{seam.seam.attribute:<34} {place:<44} {seam.problem or 'matches'}")
    return lines


def _place(found: TreeSite) -> str:
    if found.module is None:
        return ""
    numbers = ",".join(str(node.lineno) for node in found.nodes)
    return f"{found.module.file.removeprefix('megatron/')}:{numbers}"


def _moved(found: TreeSite, before: TreeSite | None) -> str:
    if before is None or before.problem:
        return "matches"
    if [ast.unparse(n) for n in found.nodes] != [ast.unparse(n) for n in before.nodes]:
        return "matches; the expression changed: " + " | ".join(
            dict.fromkeys(ast.unparse(n) for n in found.nodes)
        )
    old = [node.lineno for node in before.nodes]
    if old != [node.lineno for node in found.nodes]:
        return f"matches; was at {','.join(map(str, old))}"
    return "matches; unmoved"
