"""Sums that are bitwise the same in every order: fixed point in two 64-bit limbs.

A term v = w·x (rounded once to float64) is split as v = high·2⁻¹⁰ + low·2⁻⁵² + an error of at most
2⁻⁵³. Integers add up without rounding, so limbs may be summed over tokens, micro-batches and ranks
in any order, with an all-reduce of int64, and decode to the same float64. Limits: |v| < 2³¹ (a
larger one counts as infinite), 2²¹ tokens in one call, |sum| < 2⁵³.

Limbs are int64 [..., 3]: high, low, flags. Flags count calls that met NaN, +∞ and −∞, in fields of
21 bits. `combine` brings a sum of limbs back into range before it is added to many others.
"""

import torch
from torch import Tensor

HIGH_BITS = 10
LOW_BITS = 52
CARRY_BITS = LOW_BITS - HIGH_BITS
LIMIT = 2.0**31
FLAG_BITS = 21
NAN_FLAG, POSITIVE_FLAG, NEGATIVE_FLAG = 1, 1 << FLAG_BITS, 1 << 2 * FLAG_BITS


def to_limbs(v: Tensor) -> Tensor:
    """Limbs of each term: float64 [...] → int64 [..., 3]."""
    finite = v.abs() < LIMIT  # False for NaN
    kept = torch.where(finite, v, 0.0)
    high = (kept * 2.0**HIGH_BITS).round()
    low = ((kept - high * 2.0**-HIGH_BITS) * 2.0**LOW_BITS).round()
    flags = torch.where(v.isnan(), NAN_FLAG, torch.where(v > 0, POSITIVE_FLAG, NEGATIVE_FLAG))
    return torch.stack(
        [high.to(torch.int64), low.to(torch.int64), torch.where(finite, 0, flags)], -1
    )


def combine(limbs: Tensor) -> Tensor:
    """The same values with 0 ≤ low < 2⁴² and each flag at most 1: int64 [..., 3]."""
    high, low, flags = limbs.unbind(-1)
    fields = [(flags >> shift) & (2**FLAG_BITS - 1) for shift in (0, FLAG_BITS, 2 * FLAG_BITS)]
    seen = [(field > 0).to(torch.int64) << i * FLAG_BITS for i, field in enumerate(fields)]
    carry = low >> CARRY_BITS
    return torch.stack([high + carry, low - (carry << CARRY_BITS), sum(seen, 0 * flags)], -1)


def limbs_to_float64(limbs: Tensor) -> Tensor:
    """Decodes limbs (or sums of limbs) to float64 [...].

    NaN if a term was NaN or infinities of both signs met, ±∞ if one was.
    """
    high, low, flags = combine(limbs).unbind(-1)
    value = high.to(torch.float64) * 2.0**-HIGH_BITS + low.to(torch.float64) * 2.0**-LOW_BITS
    positive, negative = (flags & POSITIVE_FLAG) != 0, (flags & NEGATIVE_FLAG) != 0
    value = torch.where(positive, torch.inf, torch.where(negative, -torch.inf, value))
    return torch.where(((flags & NAN_FLAG) != 0) | (positive & negative), torch.nan, value)
