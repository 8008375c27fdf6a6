"""The patch command on a copy of the installed Megatron, and the ready-made patches."""

from __future__ import annotations

import re
import shutil
from collections import Counter
from pathlib import Path

import pytest

from megatron_dynbatch.cli import source_patch
from megatron_dynbatch.cli.main import main
from megatron_dynbatch.cli.sites import installed_root
from megatron_dynbatch.cli.tree import MARK, Tree
from megatron_dynbatch.hooks.registry import SEAMS, SITES
from megatron_dynbatch.versions import TESTED_PACKAGES
from tests.pool import ROOT

PATCHES = ROOT / "patches"


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """The files of the installed Megatron that are touched."""
    installed = installed_root()
    assert installed is not None
    tree = Tree(installed)
    files = [tree.module(name).file for name in source_patch.insertions(tree)]
    for file in [*files, "megatron/core/package_info.py"]:
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(installed / file, tmp_path / file)
    return tmp_path


def contents(root: Path) -> dict[str, bytes]:
    return {str(path.relative_to(root)): path.read_bytes() for path in root.rglob("*.py")}


def test_apply_check_revert(checkout: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = contents(checkout)
    assert main(["patch", str(checkout), "--check"]) == 1
    assert "is not patched; every site matches" in capsys.readouterr().out
    assert main(["patch", str(checkout), "--apply"]) == 0
    once = contents(checkout)
    assert once != before
    assert main(["patch", str(checkout), "--check"]) == 0
    assert main(["patch", str(checkout), "--apply"]) == 0
    assert contents(checkout) == once
    assert main(["patch", str(checkout), "--revert"]) == 0
    assert contents(checkout) == before


def test_a_patch_of_another_plugin_version_is_renewed(
    checkout: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    training = checkout / "megatron" / "training" / "training.py"
    training.write_text(training.read_text() + f"old_hook = None{MARK}\n")
    assert main(["patch", str(checkout), "--check"]) == 1
    assert "another version of the patch is in megatron/training/" in capsys.readouterr().out
    assert main(["patch", str(checkout), "--apply"]) == 0
    assert main(["patch", str(checkout), "--check"]) == 0
    assert "old_hook" not in training.read_text()


def test_nothing_is_written_where_a_site_is_missing(
    checkout: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    training = checkout / "megatron" / "training" / "training.py"
    loop = "while iteration < args.train_iters:"
    text = training.read_text()
    assert text.count(loop) == 1
    training.write_text(text.replace(loop, "while iteration <= args.train_iters - 1:"))
    before = contents(checkout)
    for action in ([], ["--apply"], ["--check"]):
        assert main(["patch", str(checkout), *action]) == 1
        said = capsys.readouterr()
        assert "loop condition: found 0 times in train, expected 1" in said.err
        assert said.out == ""
    assert contents(checkout) == before


def test_a_folder_without_megatron_is_a_usage_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for action in ("--apply", "--revert"):
        assert main(["patch", str(tmp_path), action]) == 2
        assert "is not a Megatron-LM tree" in capsys.readouterr().err


def test_every_tested_version_has_a_ready_made_patch() -> None:
    assert {f"megatron-core-{version}.patch" for version in TESTED_PACKAGES} <= {
        path.name for path in PATCHES.glob("*.patch")
    }


@pytest.mark.parametrize("path", sorted(PATCHES.glob("*.patch")), ids=lambda path: path.stem)
def test_ready_made_patches_only_add_lines_of_ours(path: Path) -> None:
    for line in path.read_text().splitlines():
        assert re.match(r"diff --git |--- a/|\+\+\+ b/|@@ -\d+,0 \+\d+,\d+ @@$", line) or (
            line.startswith("+") and line.endswith(MARK)
        ), line


@pytest.mark.parametrize("path", sorted(PATCHES.glob("*.patch")), ids=lambda path: path.stem)
def test_ready_made_patches_cover_the_registry(path: Path) -> None:
    major, minor = map(int, path.stem.removeprefix("megatron-core-").split(".")[:2])
    text = path.read_text()
    assert set(re.findall(r"dynbatch_seam\('([^']+)'", text)) == {
        seam.key for seam in SEAMS if (major, minor) >= seam.since
    }, "run patches/generate.py"
    found = Counter(re.findall(r"dynbatch_site\('([^']+)'", text))
    assert found.keys() == {site.name for site in SITES}
    assert all(found[site.name] in site.counts for site in SITES)


@pytest.mark.parametrize("version", TESTED_PACKAGES)
def test_ready_made_patches_are_what_the_command_writes(version: str) -> None:
    root = ROOT / ".venv" / f"megatron-core-{version}"
    installed = installed_root()
    assert installed is not None
    if Tree(installed).label == version:
        root = installed
    if not root.is_dir():
        pytest.skip(f"megatron-core {version} is not in {root}: make test-versions installs it")
    ready = (PATCHES / f"megatron-core-{version}.patch").read_text()
    assert ready == source_patch.diff(Tree(root)), "run patches/generate.py"
