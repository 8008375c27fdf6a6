"""The command as a whole: help, errors of one line, colour, completion, a fast start."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_dynbatch.cli import console
from megatron_dynbatch.cli.main import COMMANDS, main


def command(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "megatron_dynbatch.cli.main", *arguments],
        env={**os.environ, **environment}, capture_output=True, text=True, timeout=120,
    )  # fmt: skip


def test_help_is_one_screen_and_names_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main(["--help"])
    assert end.value.code == 0
    shown = capsys.readouterr().out
    assert len(shown.splitlines()) <= 35 and all(len(line) <= 100 for line in shown.splitlines())
    assert all(re.search(rf"^    {name}\b", shown, re.M) for name in COMMANDS)


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_has_examples_that_its_parser_takes(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    try:
        code = main([name, "--help"])
    except SystemExit as end:
        code = int(end.code or 0)
    assert code == 0
    shown = capsys.readouterr().out
    assert f"  megatron-dynbatch {name}" in shown.split("examples:")[1]


def test_help_imports_neither_torch_nor_megatron() -> None:
    probe = (
        "import json, sys\nfrom megatron_dynbatch.cli.main import main\n"
        "for name in sys.argv[1:]:\n"
        "    try: main([name, '--help'])\n    except SystemExit: pass\n"
        "heavy = {'torch', 'megatron', 'matplotlib', 'ray'} & sys.modules.keys()\n"
        "print('HEAVY' + json.dumps(sorted(heavy)))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", probe, "--help", *COMMANDS],
        capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert json.loads(done.stdout.rpartition("HEAVY")[2]) == []


def test_an_error_is_one_line_unless_debug(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["plan", "--lengths", str(tmp_path / "none.jsonl"), "--max-tokens-per-gpu", "8"]
    assert main(arguments) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line == f"megatron-dynbatch plan: --lengths {tmp_path}/none.jsonl: no such file"
    for debug in (["--debug", *arguments], [*arguments, "--debug"]):
        with pytest.raises(ValueError, match="no such file"):
            main(debug)


def test_a_fault_of_the_program_has_a_code_of_its_own(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken(args: object) -> int:
        raise KeyError("rows")

    monkeypatch.setattr("megatron_dynbatch.cli.completion.run", broken)
    assert main(["completion", "bash"]) == 3
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("megatron-dynbatch completion: KeyError: 'rows' (a fault")


def test_output_may_be_cut_off() -> None:
    done = subprocess.run(
        f"{sys.executable} -m megatron_dynbatch.cli.main plan --distribution A --json | head -1",
        shell=True, capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert done.stdout == "{\n" and done.stderr == ""


class Terminal:
    """A stream that says what it is."""

    def __init__(self, is_terminal: bool) -> None:
        self.is_terminal = is_terminal

    def isatty(self) -> bool:
        return self.is_terminal


def test_colour_only_on_a_terminal_that_wants_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm")
    assert console.styled("no", "bold red", Terminal(True)) == "\033[1;31mno\033[0m"  # type: ignore[arg-type]
    assert console.styled("no", "red", Terminal(False)) == "no"  # type: ignore[arg-type]
    monkeypatch.setenv("NO_COLOR", "1")
    assert console.styled("no", "red", Terminal(True)) == "no"  # type: ignore[arg-type]
    monkeypatch.setenv("NO_COLOR", "")
    monkeypatch.setenv("TERM", "dumb")
    assert console.styled("no", "red", Terminal(True)) == "no"  # type: ignore[arg-type]


def complete(line: str) -> list[str]:
    """What the shell would be offered behind the line."""
    pytest.importorskip("argcomplete")
    read, write = os.pipe()
    with os.fdopen(read) as answers:
        # File descriptor 8 is where argcomplete writes.
        subprocess.run(
            ["bash", "-c", f'exec 8>&{write} 9>/dev/null; exec "$0" "$@"', sys.executable,
             "-m", "megatron_dynbatch.cli.main"],
            env={**os.environ, "_ARGCOMPLETE": "1", "_ARGCOMPLETE_IFS": "\n",
                 "COMP_LINE": line, "COMP_POINT": str(len(line))},
            pass_fds=[write], timeout=120, check=True,
        )  # fmt: skip
        os.close(write)
        return [word.strip() for word in answers.read().splitlines()]


def test_the_shell_completes_commands_flags_and_choices() -> None:
    assert set(complete("megatron-dynbatch ")) >= set(COMMANDS)
    assert "--max-tokens-per-gpu" in complete("megatron-dynbatch plan --max-t")
    assert complete("megatron-dynbatch plan --leftover pa") == ["partial"]


def test_completion_code_is_printed_for_each_shell(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("argcomplete")
    for shell in ("bash", "zsh", "fish"):
        assert main(["completion", shell]) == 0
        assert "megatron-dynbatch" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "megatron-dynbatch: the following arguments are required: COMMAND"),
        (["plan"], "megatron-dynbatch plan: one of the arguments --rollouts --lengths"),
        (["plan", "--distribution", "Z"], "argument --distribution: invalid choice: 'Z'"),
        (["doctor", "--jason"], "unrecognized arguments: --jason"),
    ],
)
def test_wrong_usage_is_one_line(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as end:
        main(arguments)
    assert end.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert message in line and line.endswith("--help")
