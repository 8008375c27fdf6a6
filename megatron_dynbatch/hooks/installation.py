"""Switch the plugin on in this process, whole or not at all, and off again."""

from __future__ import annotations

import importlib
import warnings
from typing import Any

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
    found = {seam: _attribute(seam) for seam in SEAMS}
    install_sites(SITES)
    for seam, original in found.items():
        _originals[seam] = original
        setattr(importlib.import_module(seam.module), seam.attribute, seam.wrap(original))
    _warn_if_untested()


def uninstall() -> None:
    """Undo `install` and forget the run, if there is one."""
    for seam, original in _originals.items():
        setattr(importlib.import_module(seam.module), seam.attribute, original)
    _originals.clear()
    uninstall_sites()
    end_session()


def _attribute(seam: Seam) -> Any:
    module = importlib.import_module(seam.module)
    try:
        return getattr(module, seam.attribute)
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
