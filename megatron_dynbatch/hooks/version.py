"""Which megatron-core is installed."""

from __future__ import annotations

type Version = tuple[int, int]
"""(major, minor)."""

# Megatron's router takes a padding mask that it understands from here on.
AUX_LOSSES_SINCE: Version = (0, 19)


def core_version() -> Version:
    """That of the installed megatron-core."""
    from megatron.core.package_info import MAJOR, MINOR

    return MAJOR, MINOR
