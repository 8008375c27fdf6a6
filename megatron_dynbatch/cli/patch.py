"""``megatron-dynbatch patch``: the plugin's hooks as a source patch for a Megatron-LM checkout."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from megatron_dynbatch.wording import counted

if TYPE_CHECKING:
    from megatron_dynbatch.cli.tree import Tree

DESCRIPTION = """\
Writes a unified diff that puts the plugin's hook calls into the source of a Megatron-LM checkout,
for those who do not want functions changed at run time. It only adds lines. Apply it with
--apply, or with `git apply --unidiff-zero` to exactly this checkout.
"""
EXAMPLES = """\
  megatron-dynbatch patch Megatron-LM > dynbatch.patch
  megatron-dynbatch patch Megatron-LM --apply
  megatron-dynbatch patch Megatron-LM --check"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of the subcommand."""
    parser.add_argument("checkout", type=Path, help="folder that contains megatron/")
    action = parser.add_mutually_exclusive_group()
    action.add_argument("--apply", action="store_true", help="change the files; renews an old one")
    action.add_argument("--revert", action="store_true", help="take the inserted lines out again")
    action.add_argument(
        "--check", action="store_true", help="exit code 0 if the checkout carries this very patch"
    )


def run(args: argparse.Namespace) -> int:
    """Print, apply, revert or check the patch."""
    # The table of hooks imports torch, which takes seconds: help must not wait for it.
    from megatron_dynbatch.cli import source_patch
    from megatron_dynbatch.cli.tree import Tree
    from megatron_dynbatch.hooks.sites import SiteError

    if args.revert:
        return _revert(args.checkout)
    tree = Tree(args.checkout)
    try:
        patched = source_patch.patched(tree)
    except SiteError as error:
        print(f"{error}\nnothing was written", file=sys.stderr)
        return 1
    if args.check:
        return _check(tree, patched)
    if args.apply:
        for name, text in patched.items():
            _write(tree.root / tree.module(name).file, text)
        files = counted(len(patched), "file")
        print(f"patched {files} of megatron-core {tree.label} in {tree.root}")
        return 0
    print(source_patch.diff(tree), end="")
    return 0


def _check(tree: Tree, patched: dict[str, str]) -> int:
    other = [tree.module(name).file for name, text in patched.items()
             if tree.module(name).text != text]
    if not other:
        print(f"{tree.root} (megatron-core {tree.label}) carries this patch")
        return 0
    bare = all(tree.module(name).text == tree.module(name).original for name in patched)
    if bare:
        print(f"{tree.root} (megatron-core {tree.label}) is not patched; every site matches")
    else:
        print(f"another version of the patch is in {', '.join(other)}; renew it with --apply")
    return 1


def _revert(checkout: Path) -> int:
    """Take inserted lines out of every file, whatever version of the plugin put them there."""
    from megatron_dynbatch.cli.tree import Tree, without_patch

    Tree(checkout)  # raises if it is something else
    reverted = 0
    for path in sorted((checkout / "megatron").rglob("*.py")):
        with path.open(encoding="utf-8", newline="") as stream:
            text = stream.read()
        original = without_patch(text)
        if original != text:
            _write(path, original)
            reverted += 1
    print(f"reverted {counted(reverted, 'file')} in {checkout}")
    return 0


def _write(path: Path, text: str) -> None:
    with path.open("w", encoding="utf-8", newline="") as stream:
        stream.write(text)
