"""The one way this package replaces something that belongs to another library."""

from __future__ import annotations

from typing import Any


def swap(owner: Any, name: str, value: Any) -> None:
    """Replace an attribute that must already be there.

    Args:
        owner: Module, class or object that has the attribute.
        name: Attribute to replace.
        value: What it is from now on.

    Raises:
        ValueError: The attribute does not exist. A stand-in for nothing would hide that the
            library has changed, so it is never created.
    """
    if not hasattr(owner, name):
        where = getattr(owner, "__name__", type(owner).__name__)
        raise ValueError(
            f"cannot run on CPU: {where} has no attribute {name!r} in this version; "
            "use a version from the table of supported versions"
        )
    setattr(owner, name, value)
