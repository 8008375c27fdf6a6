"""Names that a package offers and that live elsewhere: imported when they are first used."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from typing import Any


def names_from(homes: Mapping[str, str], package: str) -> Callable[[str], Any]:
    """The `__getattr__` of a package for names that live elsewhere.

    Args:
        homes: Name → module below `megatron_dynbatch` in which it lives.
        package: `__name__` of the package.
    """

    def get(name: str) -> Any:
        home = homes.get(name)
        if home is None:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        return getattr(importlib.import_module(f"megatron_dynbatch.{home}"), name)

    return get
