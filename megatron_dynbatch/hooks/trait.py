"""What an entry of the table of traits is, and the tests that entries are made of."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from megatron_dynbatch.hooks.version import Version

type Test = Callable[[argparse.Namespace], bool]


@dataclass(frozen=True, slots=True)
class Trait:
    """A property of a model, of a training or of its script.

    Attributes:
        kind: What it is a property of.
        name: As `--admit-unproven` takes it.
        flag: What brings it, as it begins a sentence.
        present: Whether parsed arguments have it; None: they do not tell, it is seen later.
        row: (table, row) of docs/parity.md that proves it; None: nothing does.
        reason: Of one without a row: "why it is refused; what to write instead".
        since: First megatron-core that the row stands for.
        admissible: Whether `--admit-unproven` takes it; False: it cannot work.
    """

    kind: str
    name: str
    flag: str
    present: Test | None
    row: tuple[str, str] | None = None
    reason: str = ""
    since: Version = (0, 16)
    admissible: bool = True


@dataclass(frozen=True, slots=True)
class Pair:
    """Two traits that no training of `proven` has together, for a reason that is known.

    Attributes:
        names: Of the traits.
        reason: "why; what to write instead", or what to do.
        trains: Whether it trains all the same, with a warning; else nothing admits it.
    """

    names: frozenset[str]
    reason: str
    trains: bool = False


def on(*names: str) -> Test:
    """Whether one of these arguments is set."""
    return lambda args: any(getattr(args, name, None) for name in names)


def given(name: str) -> Test:
    """Whether an argument was given, 0 too."""
    return lambda args: getattr(args, name, None) is not None


def equals(name: str, *values: object) -> Test:
    """Whether an argument has one of these values."""
    return lambda args: getattr(args, name, None) in values


def above_one(*names: str) -> Test:
    """Whether one of these sizes is more than 1."""
    return lambda args: any((getattr(args, name, None) or 1) > 1 for name in names)


def both(first: Test, second: Test) -> Test:
    """Whether two tests are true."""
    return lambda args: first(args) and second(args)


def negated(test: Test) -> Test:
    """Whether a test is false."""
    return lambda args: not test(args)


def balancing(args: argparse.Namespace) -> Iterator[tuple[str, float]]:
    """(type, coefficient) of the load balancing of each router."""
    if not getattr(args, "num_experts", None):
        return
    kinds = getattr(args, "moe_router_load_balancing_type", "none")
    kinds = [kinds] if isinstance(kinds, str) else kinds
    given = getattr(args, "moe_aux_loss_coeff", 0.0)
    coefficients = given if isinstance(given, list) else [given]
    # One coefficient is for all types; Megatron refuses other numbers of them.
    if len(coefficients) == 1:
        coefficients = coefficients * len(kinds)
    yield from zip(kinds, coefficients, strict=False)


def balances(kind: str) -> Test:
    """Whether a load-balancing loss of this type has a coefficient."""
    return lambda args: any(k == kind and c for k, c in balancing(args))


def routes_by(*kinds: str) -> Test:
    """Whether the load balancing is of one of these types, whatever its coefficient."""
    return lambda args: any(kind in kinds for kind, _ in balancing(args))
