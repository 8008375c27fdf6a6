"""What of a training is refused before it begins: traits and pairs of them that nothing proves.

`--admit-unproven TRAIT` admits a trait without a row, `--admit-unproven TRAIT+TRAIT` a pair, each
with a warning; what cannot work is not admitted.
"""

from __future__ import annotations

import argparse
import itertools
import os
import warnings
from collections.abc import Iterator, Sequence, Set
from dataclasses import dataclass
from typing import Any

from megatron_dynbatch.errors import OptionError
from megatron_dynbatch.hooks import version
from megatron_dynbatch.hooks.proven import PROVEN
from megatron_dynbatch.hooks.refusals import PAIRS
from megatron_dynbatch.hooks.trait import Trait, balances, both, equals
from megatron_dynbatch.hooks.traits import BY_NAME, TRAITS, traits_of

UNPROVEN = tuple(trait for trait in TRAITS if trait.row is None and trait.admissible)
MODEL_CLASS = BY_NAME["model-class"]


@dataclass(frozen=True, slots=True)
class Verdict:
    """What is held of a trait, or of a pair of traits, of a command line.

    Attributes:
        name: As `--admit-unproven` takes it.
        fault: Why it is refused and what to write instead; None where it trains.
        admissible: Whether `--admit-unproven` takes it.
        row: What proves it.
        caveat: What is to be known of one without a row.
    """

    name: str
    fault: str | None = None
    admissible: bool = True
    row: str = ""
    caveat: str = "refused"


def verdict_of(trait: Trait) -> Verdict:
    """Whether a trait has a row for the installed megatron-core."""
    if trait.row is None:
        return Verdict(trait.name, f"{trait.flag}: {trait.reason}", trait.admissible)
    if (here := version.core_version()) < trait.since:
        fault = (
            f"{trait.flag}: its row in docs/parity.md stands for megatron-core "
            f"{shown(trait.since)} and newer, this is {shown(here)}; take that version, or "
            "another option"
        )
        return Verdict(trait.name, fault, trait.admissible)
    return Verdict(trait.name, row=f"docs/parity.md: {trait.row[1]}")


def shown(core: version.Version) -> str:
    """As people write it."""
    return ".".join(map(str, core))


def verdict_of_pair(first: Trait, second: Trait) -> Verdict:
    """Whether two traits, each with a row of its own, have one together."""
    name, names = f"{first.name}+{second.name}", frozenset((first.name, second.name))
    for pair in PAIRS:
        if pair.names == names:
            sentence = f"{first.flag} with {second.flag}: {pair.reason}"
            if pair.trains:
                return Verdict(name, caveat=sentence)
            return Verdict(name, sentence, admissible=False)
    row = next((row for row, traits in PROVEN.items() if names <= traits), None)
    if row is not None:
        return Verdict(name, row=f"docs/parity.md: pairs, {row}")
    fault = f"{first.flag} with {second.flag}: no parity test has both; leave one of them out"
    return Verdict(name, fault)


def verdicts(args: argparse.Namespace) -> Iterator[Verdict]:
    """Of each trait of the arguments, and of each pair of those that have a row."""
    standing = []
    for trait in traits_of(args):
        verdict = verdict_of(trait)
        if verdict.fault is None:
            standing.append(trait)
        yield verdict
    for first, second in itertools.combinations(standing, 2):
        yield verdict_of_pair(first, second)


def refused(args: argparse.Namespace) -> list[str]:
    """A sentence for each trait and pair that is refused; what is admitted is warned of, once.

    Raises:
        OptionError: `--admit-unproven` names no trait.
    """
    admitted = {_key(name) for name in args.admit_unproven or ()}
    _check_names(args.admit_unproven or ())
    sentences = []
    for verdict in verdicts(args):
        if verdict.fault is None:
            if not verdict.row:
                warn_once(verdict.name, verdict.caveat)
            continue
        if not verdict.admissible:
            sentences.append(verdict.fault)
        elif _key(verdict.name) in admitted:
            _warn_once(verdict)
        else:
            sentences.append(f"{verdict.fault}, or admit it with --admit-unproven {verdict.name}")
    return sentences


def _key(name: str) -> frozenset[str]:
    return frozenset(name.split("+"))


def _check_names(names: Sequence[str]) -> None:
    impossible = {pair.names for pair in PAIRS if not pair.trains}
    wrong = []
    for name in names:
        parts = name.split("+")
        is_known = all(part in BY_NAME and BY_NAME[part].row is not None for part in parts)
        is_pair = len(parts) == 2 and is_known and parts[0] != parts[1]
        is_trait = len(parts) == 1 and name in BY_NAME and BY_NAME[name].admissible
        if not is_trait and (not is_pair or _key(name) in impossible):
            wrong.append(name)
    if wrong:
        raise OptionError(
            f"--admit-unproven {' '.join(sorted(wrong))}: no such trait; there are "
            f"{', '.join(sorted(trait.name for trait in UNPROVEN))}, and pairs A+B of those with a "
            "row in docs/compatibility.md"
        )


_warned: set[str] = set()


def _warn_once(verdict: Verdict) -> None:
    assert verdict.fault is not None
    reason = verdict.fault.rpartition("; ")[0]
    warn_once(verdict.name, f"admitted without a parity test: {reason}")


def warn_once(name: str, sentence: str) -> None:
    """Warn once in a process, on rank 0."""
    if name in _warned or os.environ.get("RANK", "0") != "0":
        return
    _warned.add(name)
    warnings.warn(sentence, stacklevel=3)


def warn_of_packing(args: argparse.Namespace) -> None:
    """Name the alternatives where the load-balancing loss is that of each micro-batch."""
    if both(balances("aux_loss"), equals("moe_balance", "micro-batch"))(args):
        warn_once(
            "aux-loss",
            "--moe-router-load-balancing-type aux_loss is a product of means over a micro-batch, "
            "so it depends on which samples are packed together (docs/parity.md has the spread); "
            "--moe-balance previous-step or same-step makes it the same for every packing",
        )


def check_model(chunks: Sequence[Any], admitted: Set[str]) -> None:
    """Refuse a model of a class that has no parity row.

    Args:
        chunks: The model.
        admitted: Traits of --admit-unproven.

    Raises:
        OptionError: A chunk is no GPTModel.
    """
    from megatron.core.models.gpt import GPTModel
    from megatron.core.utils import unwrap_model

    for chunk in chunks:
        model = unwrap_model(chunk)
        if not isinstance(model, GPTModel) and MODEL_CLASS.name not in admitted:
            raise OptionError(
                f"the model is a {type(model).__name__}: {MODEL_CLASS.reason}, or admit yours with "
                f"--admit-unproven {MODEL_CLASS.name}"
            )
