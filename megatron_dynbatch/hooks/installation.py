"""Switch the plugin on in this process, whole or not at all, and off again."""

from __future__ import annotations

import importlib
import inspect
import warnings
from typing import Any

from megatron_dynbatch.hooks.refusals import core_version
from megatron_dynbatch.hooks.registry import SEAMS, SITES, TESTED_VERSIONS, Seam
from megatron_dynbatch.hooks.session import end_session
from megatron_dynbatch.hooks.sites import SiteError, install_sites, uninstall_sites

_originals: dict[Seam, Any] = {}


def install() -> None:
    """Hook into the Megatron of this process; nothing changes until the flag is given.

    Call it before Megatron parses its arguments; whether names were imported from Megatron before
    does not matter. Calling it twice is the same as once.

    Raises:
        ModuleNotFoundError: ``megatron.training`` is not installed.
        SiteError: This Megatron does not look as expected; nothing was changed.
    """
    if _originals:
        return
    found = {seam: _original(seam) for seam in SEAMS if core_version() >= seam.since}
    install_sites(SITES)
    for seam, original in found.items():
        _originals[seam] = original
        owner, name = _owner(seam)
        setattr(owner, name, seam.wrap(original))
    _warn_if_untested()


def uninstall() -> None:
    """Undo `install` and forget the run, if there is one."""
    for seam, original in _originals.items():
        setattr(*_owner(seam), original)
    _originals.clear()
    uninstall_sites()
    end_session()


def _owner(seam: Seam) -> tuple[Any, str]:
    """The module or class that has the attribute, and the attribute's name there."""
    owner: Any = importlib.import_module(seam.module)
    *classes, name = seam.attribute.split(".")
    for class_name in classes:
        owner = getattr(owner, class_name)
    return owner, name


def _original(seam: Seam) -> Any:
    try:
        # A static method is kept as such, so that it can be put back.
        return inspect.getattr_static(*_owner(seam))
    except AttributeError:
        raise SiteError(
            f"{seam.module} has no {seam.attribute}; this Megatron is not supported"
        ) from None


def _warn_if_untested() -> None:
    from megatron.core.package_info import __version__ as version

    if version.partition("+")[0] not in TESTED_VERSIONS:
        warnings.warn(
            f"megatron_dynbatch is tested with megatron-core {', '.join(TESTED_VERSIONS)}; all "
            f"its sites match in {version}, which is not among them",
            stacklevel=3,
        )
