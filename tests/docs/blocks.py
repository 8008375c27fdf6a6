"""Code in the documentation, and the command lines that stand in it and in the examples."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tests.pool import ROOT

PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
EXAMPLES = sorted([*(ROOT / "examples").glob("*.py"), *(ROOT / "examples").glob("*.sh")])

_FENCE = re.compile(r"^( *)```(\w+)\n(.*?)^\1```$", re.M | re.S)
# Lines of a shell script that are no commands to look at.
_PASSED_OVER = re.compile(r"#|[a-z_]+=\$\(")
# In an example: indented, and alone on its lines.
_EXAMPLE_COMMAND = re.compile(
    r"^ {2,}((?:MEGATRON_LM=\S+ )?(?:torchrun|python|bash|megatron-dynbatch) (?:.*\\\n)*.*)$", re.M
)


@dataclass(frozen=True)
class Block:
    """A fenced block.

    Attributes:
        page: File it stands in.
        line: Its first line there.
        language: What stands behind the fence.
        text: What is between the fences, not indented.
    """

    page: Path
    line: int
    language: str
    text: str

    @property
    def place(self) -> str:
        """For messages."""
        return f"{self.page.relative_to(ROOT)}:{self.line}"


def blocks(page: Path, language: str) -> list[Block]:
    """The fenced blocks of a language."""
    text = page.read_text(encoding="utf-8")
    found = []
    for match in _FENCE.finditer(text):
        indent, name, body = match.groups()
        if name == language:
            lines = [line.removeprefix(indent) for line in body.splitlines(keepends=True)]
            line = text.count("\n", 0, match.start()) + 2
            found.append(Block(page, line, name, "".join(lines)))
    return found


def command_lines(text: str) -> Iterator[list[str]]:
    """The commands of a shell block as words, continued lines joined."""
    for line in re.sub(r"\\\n\s*", " ", text).splitlines():
        line = line.strip()
        if not line or _PASSED_OVER.match(line):
            continue
        if line.startswith("eval "):  # eval "$(command)"
            line = line[len('eval "$(') : line.index(')"')]
        words = shlex.split(line, comments=True)
        yield [word for word in words if word not in ("…", "...")]


def example_commands(path: Path) -> Iterator[list[str]]:
    """The commands in the docstring or the comments of an example."""
    text = re.sub(r"^# ?", "", path.read_text(encoding="utf-8"), flags=re.M)
    text = text.partition("set -euo")[0] if path.suffix == ".sh" else text.split('"""')[1]
    for match in _EXAMPLE_COMMAND.finditer(text):
        yield from command_lines(match[1])


def inline_commands(page: Path) -> list[list[str]]:
    """The commands within the sentences of a page, as words."""
    text = _FENCE.sub("", page.read_text(encoding="utf-8"))
    found = re.findall(r"`((?:megatron-dynbatch|make|python -m|pip install) [^`\n]+)`", text)
    return [shlex.split(command) for command in found]
