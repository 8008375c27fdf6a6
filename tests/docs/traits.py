"""``python -m tests.docs.traits``: write the table of traits into docs/compatibility.md."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator

from megatron_dynbatch.hooks.admission import shown, verdict_of_pair
from megatron_dynbatch.hooks.trait import Trait
from megatron_dynbatch.hooks.traits import TRAITS
from tests.pool import ROOT

PAGE = ROOT / "docs" / "compatibility.md"
# Of these kinds a training has one at most.
EXCLUSIVE = {
    "attention", "softmax", "positions", "load balancing", "reduction", "width", "optimizer",
}  # fmt: skip
_PLACE = re.compile(r"(<!-- traits: [^\n]* -->\n).*?(<!-- end of traits -->)", re.DOTALL)


def with_table(text: str) -> str:
    """The page with the table as it is now."""
    tables = f"\n{table_of_traits()}\n{PAIRS}\n{table_of_pairs()}\n"
    return _PLACE.sub(lambda found: f"{found[1]}{tables}{found[2]}", text)


def table_of_traits() -> str:
    """Every trait as a Markdown table."""
    lines = [
        "| | trait | what brings it | megatron-core | row of [parity.md](parity.md) |",
        "|---|---|---|---|---|",
    ]
    for trait in TRAITS:
        if trait.row is not None:
            proof, since = trait.row[1], f"{shown(trait.since)} and newer"
        else:
            proof, since = "**refused**" + " unless admitted" * trait.admissible, ""
        lines.append(f"| {trait.kind} | `{trait.name}` | {trait.flag} | {since} | {proof} |")
    return "\n".join(lines) + "\n"


PAIRS = """\
Two traits that each have a row need one together: a training of
[these](parity.md#every-two-traits-together) that has both. Pairs without:
"""


def table_of_pairs() -> str:
    """The pairs that nothing proves as a Markdown table."""
    lines = ["| pair | |", "|---|---|"]
    for first, second in possible_pairs():
        verdict = verdict_of_pair(first, second)
        if not verdict.row:
            state = verdict.caveat.partition(": ")[2]
            if verdict.fault is not None:
                reason = verdict.fault.partition(": ")[2]
                state = "**refused**" + " unless admitted" * verdict.admissible + f": {reason}"
            lines.append(f"| `{verdict.name}` | {state} |")
    return "\n".join(lines) + "\n"


def possible_pairs() -> Iterator[tuple[Trait, Trait]]:
    """Pairs of traits with rows that one training may have."""
    standing = [trait for trait in TRAITS if trait.row is not None]
    for first, second in itertools.combinations(standing, 2):
        if first.kind != second.kind or first.kind not in EXCLUSIVE:
            yield first, second


if __name__ == "__main__":
    PAGE.write_text(with_table(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
