"""What the statements call that a source patch inserts into a Megatron checkout.

`megatron-dynbatch patch` writes them from the same registry that `install()` works with, so a
patched checkout does at its sites and seams what a hooked one does, without changing any function
at run time.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

from megatron_dynbatch.hooks.seams import hooked
from megatron_dynbatch.hooks.sites import Handler, SiteError


def dynbatch_site(name: str, value: Any, frame: Mapping[str, Any]) -> Any:
    """What to use instead of ``value`` at a named site.

    Args:
        name: The site.
        value: What Megatron computed there.
        frame: The function's locals.
    """
    return _handler(name)(value, frame)


def dynbatch_seam(key: str, original: Any) -> Any:
    """The function at a seam behind its hook.

    Args:
        key: ``module:attribute``.
        original: What Megatron bound to the name.
    """
    return hooked(key, original, functools.partial(_wrap, key), in_source=True)


@functools.cache
def _handler(name: str) -> Handler:
    from megatron_dynbatch.hooks.registry import SITES

    for site in SITES:
        if site.name == name:
            return site.handler
    raise SiteError(_OUTDATED.format(name))


def _wrap(key: str) -> Any:
    from megatron_dynbatch.hooks.installation import install
    from megatron_dynbatch.hooks.registry import SEAMS

    # All modules are loaded when the first hook is called; now the patch can be checked as a whole.
    install()
    for seam in SEAMS:
        if seam.key == key:
            return seam.wrap
    raise SiteError(_OUTDATED.format(key))


_OUTDATED = (
    "this Megatron checkout was patched by another version of megatron_dynbatch, which had a hook "
    "{!r}: run `megatron-dynbatch patch CHECKOUT --revert`, then --apply"
)
