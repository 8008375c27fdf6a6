"""Which sites moved: the installed Megatron against a changed copy of it."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron_dynbatch.cli.main import main
from megatron_dynbatch.cli.sites import installed_root
from tests.cli.test_patch import checkout as copied  # noqa: F401

INSTALLED = installed_root()


def lines(capsys: pytest.CaptureFixture[str]) -> dict[str, str]:
    """Last column by name of site or seam."""
    out = capsys.readouterr().out
    return {line[:34].rstrip(): line for line in out.splitlines() if "matches" in line
            or "found" in line or "has no" in line}


def test_the_installed_megatron_has_not_moved(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["sites", str(INSTALLED)]) == 0
    found = lines(capsys)
    assert found["loop condition"].endswith("matches; unmoved")
    assert found["add_megatron_arguments"].endswith("matches")


def test_moved_changed_and_missing_sites_are_told(
    copied: Path, capsys: pytest.CaptureFixture[str]  # noqa: F811
) -> None:
    training = copied / "megatron" / "training" / "training.py"
    text = training.read_text()
    increment = "            get_num_microbatches()\n            * args.micro_batch_size\n"
    assert text.count(increment) == 1
    text = text.replace(increment, "            args.micro_batch_size * get_num_microbatches()\n")
    text = text.replace("def build_train_valid_test_data_iterators", "def build_iterators")
    text = text.replace("if get_num_microbatches() != num_microbatches and", "if")
    training.write_text("\n\n" + text)
    assert main(["sites", str(copied)]) == 1
    found = lines(capsys)
    assert "the expression changed: args.micro_batch_size * get_n" in found["scheduler increment"]
    assert "matches; was at " in found["loop condition"]
    assert "found 0 times in train, expected 1" in found["micro-batch count check"]
    assert any("has no build_train_valid_test_data_iterators" in line for line in found.values())
