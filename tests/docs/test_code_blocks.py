"""What the documentation tells people to type: Python is run, flags go through the real parsers."""

from __future__ import annotations

import argparse
import re
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from megatron_dynbatch.cli.main import COMMANDS, build_parser
from tests.docs.blocks import (
    EXAMPLES,
    PAGES,
    blocks,
    command_lines,
    example_commands,
    inline_commands,
)
from tests.pool import ROOT, run_ranks

PYTHON = [page for page in PAGES if blocks(page, "python")]


@pytest.mark.parametrize("page", PYTHON, ids=lambda page: page.stem)
def test_python_runs(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {"__name__": "__main__"}
    for block in blocks(page, "python"):  # a page is read from top to bottom
        exec(compile("\n" * (block.line - 1) + block.text, str(page), "exec"), names)


def all_commands() -> list[tuple[str, list[str]]]:
    """Every command with the place where it stands."""
    found = [
        (block.place, words)
        for page in PAGES
        for block in blocks(page, "sh")
        for words in command_lines(block.text)
    ]
    found += [(path.name, words) for path in EXAMPLES for words in example_commands(path)]
    return found


def training_arguments(words: list[str]) -> tuple[str, list[str]] | None:
    """Script or module of a training and its arguments, if the command starts one."""
    if words[0] == "srun":
        words = words[1:]
    if words[:2] == ["megatron-dynbatch", "run"]:
        rest = words[2:]
    elif words[0] == "torchrun":
        rest = torchrun_rest(words[1:])
        if rest[:4] == ["-m", "megatron_dynbatch.cli.main", "verify", "--model"]:
            rest = rest[4:]
        elif rest[0] == "-m":
            assert rest[1] == "megatron_dynbatch.run", rest[1]
            rest = rest[2:]
    else:
        return None
    rest = [word for word in rest if word != "--cpu"]
    return (rest[1], rest[2:]) if rest[0] == "--module" else (rest[0], rest[1:])


def torchrun_rest(words: list[str]) -> list[str]:
    """What torchrun's own parser leaves: the script (or -m and a module) and its arguments."""
    from torch.distributed.run import get_args_parser

    args = get_args_parser().parse_args(words)
    module = ["-m"] if args.module else []
    return [*module, args.training_script, *args.training_script_args]


def unknown_to_megatron(command_lines: list[list[str]]) -> list[list[str]]:
    """For each command line what Megatron's parser, with the plugin, does not know; in a rank."""
    from megatron.training import arguments

    from megatron_dynbatch import hooks

    hooks.install()
    unknown = []
    for words in command_lines:
        parser = argparse.ArgumentParser(allow_abbrev=False)
        arguments.add_megatron_arguments(parser)
        unknown.append([w for w in parser.parse_known_args(words)[1] if w.startswith("--")])
    return unknown


def test_flags_of_trainings_are_known() -> None:
    trainings = []
    for place, words in all_commands():
        target = training_arguments(words)
        if words[:2] == ["megatron-dynbatch", "doctor"] and "--" in words:
            target = ("", words[words.index("--") + 1 :])
        if target is not None and "--help" not in words:
            trainings.append((place, *target))
    assert len(trainings) > 10
    for place, _, words in trainings:
        if "--dynamic-global-batch" in words:  # Megatron's defaults are 0.1, which is refused
            assert {"--attention-dropout", "--hidden-dropout"} <= set(words), place
    # This one has a parser of its own.
    own = [t for t in trainings if Path(t[1]).stem == "own_loop_mcore"]
    (unknown,) = run_ranks(
        1, unknown_to_megatron, [t[2] for t in trainings if t not in own], process_group=False
    )
    rest = iter(unknown)
    for training in trainings:
        place, script, words = training
        flags = [w for w in words if w.startswith("--")] if training in own else next(rest)
        source = source_of(script)
        for flag in flags:
            assert f'"{flag}"' in source, f"{place}: nobody knows {flag}"


def source_of(script: str) -> str:
    """The text of an example, where a script's own flags must be; empty for other scripts."""
    path = ROOT / (script if script.endswith(".py") else script.replace(".", "/") + ".py")
    return path.read_text(encoding="utf-8") if path.is_file() else ""


def test_the_script_of_the_guide_is_the_example() -> None:
    """Whoever copies it out of the page has a whole script; test_as_printed.py runs the example."""
    (block,) = (b for b in blocks(ROOT / "docs" / "integrate.md", "py") if "pretrain(" in b.text)
    script = (ROOT / "examples" / "sft.py").read_text(encoding="utf-8")
    assert script.endswith(f'"""\n\n{block.text}')


def test_other_commands_exist() -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.M))
    extras = set(re.findall(r"^([a-z]+) = \[", (ROOT / "pyproject.toml").read_text(), re.M))
    for place, words in all_commands():
        name, rest = words[0], words[1:]
        if training_arguments(words) is not None:
            continue
        if name == "megatron-dynbatch":
            build_parser(rest).parse_args(rest)
        elif name == "make":
            wanted = {word for word in rest if "=" not in word}
            assert wanted <= targets, f"{place}: {wanted - targets}"
        elif name == "pip":
            for group in re.findall(r"\[([a-z,]+)\]", " ".join(rest)):
                assert set(group.split(",")) <= extras, place
        elif rest[:1] == ["-m"]:
            assert find_spec(rest[1]) is not None, place
        elif name.endswith(("bash", ".sh", "python")) or name.startswith(("MEGATRON_LM=", "OUT=")):
            script = next(w for w in words if w.endswith((".sh", ".py")))
            assert (ROOT / script).is_file(), f"{place}: {script}"
        else:
            known = ("git", "pre-commit", "docker", "ray")
            assert name in known, f"{place}: {name!r} is not looked at by this test"


def test_commands_within_sentences_exist() -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.M))
    extras = set(re.findall(r"^([a-z]+) = \[", (ROOT / "pyproject.toml").read_text(), re.M))
    found = [(page.name, words) for page in PAGES for words in inline_commands(page)]
    assert len(found) > 50
    for name, (program, *rest) in found:
        if program == "make":
            assert {word for word in rest if "=" not in word} <= targets, f"{name}: make {rest}"
        elif program == "python":
            assert find_spec(rest[1]) is not None, f"{name}: {rest[1]}"
        elif program == "pip":
            for group in re.findall(r"\[([a-z,]+)\]", " ".join(rest)):
                assert set(group.split(",")) <= extras, f"{name}: {rest}"
        elif rest[0] not in ("…", "COMMAND", "--help"):
            assert rest[0] in COMMANDS, f"{name}: {rest[0]}"


def test_the_page_of_flags_names_every_flag_and_command() -> None:
    from megatron_dynbatch.hooks.arguments import _add_flags

    parser = argparse.ArgumentParser(add_help=False)
    _add_flags(parser)
    page = (ROOT / "docs" / "flags.md").read_text(encoding="utf-8")
    flags = [action.option_strings[0] for action in parser._actions]
    assert [flag for flag in flags if f"`{flag}" not in page] == []
    assert [name for name in COMMANDS if f"`{name}" not in page] == []
    for action in parser._actions:
        missing = [c for c in action.choices or () if f"`{c}`" not in page]
        assert not missing, f"{action.option_strings[0]}: {missing}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_local_links_exist(page: Path) -> None:
    """Files only; `make docs` also looks at anchors."""
    for target in re.findall(r"\]\(([^)#]+)[^)]*\)", page.read_text(encoding="utf-8")):
        if "://" not in target:
            assert (page.parent / target).exists(), f"{page.name}: {target}"
