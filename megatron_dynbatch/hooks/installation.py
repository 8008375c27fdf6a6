"""Switch the plugin on in this process, whole or not at all, and off again."""

from __future__ import annotations

import warnings

from megatron_dynbatch.errors import MissingPackage
from megatron_dynbatch.hooks.registry import SITES, present_seams
from megatron_dynbatch.hooks.seams import (
    Seam,
    inspect_seams,
    install_seams,
    uninstall_seams,
)
from megatron_dynbatch.hooks.session import end_session
from megatron_dynbatch.hooks.sites import (
    SiteError,
    inspect_sites,
    install_sites,
    uninstall_sites,
)
from megatron_dynbatch.versions import TESTED

_installed = False


def install() -> None:
    """Hook into the Megatron of this process; nothing changes until the flag is given.

    Call it before Megatron parses its arguments; whether names were imported from Megatron before
    does not matter. Calling it twice is the same as once. In a checkout that carries the source
    patches nothing is changed, only checked.

    Raises:
        MissingPackage: ``megatron.training`` is not installed; it is a ModuleNotFoundError too.
        SiteError: This Megatron does not look as expected; nothing was changed.
    """
    global _installed
    _need_training()
    seams = present_seams()
    missing = [r.problem for r in inspect_seams(seams) if r.problem]
    if missing:
        raise SiteError("; ".join(missing) + "; nothing was changed")
    _check_patched_as_a_whole(seams)
    install_sites(SITES)
    install_seams(seams)
    if not _installed:
        _installed = True
        _warn_if_untested()


def uninstall() -> None:
    """Undo `install` and forget the run, if there is one."""
    global _installed
    uninstall_seams()
    uninstall_sites()
    end_session()
    _installed = False


def _need_training() -> None:
    try:
        import megatron.training  # noqa: F401
    except ModuleNotFoundError as error:
        if error.name not in ("megatron", "megatron.training"):
            raise
        raise MissingPackage(
            f"megatron_dynbatch.install() hooks into megatron.training, and {error.name} is not "
            "there: pip install 'megatron-dynbatch[megatron]' (megatron-core 0.17 or newer), or "
            "put a Megatron-LM checkout on PYTHONPATH; a loop of your own needs no install(), "
            "see examples/own_loop_mcore.py",
            name=error.name,
        ) from None


def _check_patched_as_a_whole(seams: tuple[Seam, ...]) -> None:
    patched = {f"site {r.site.name!r}": r.patched for r in inspect_sites(SITES) if not r.problem}
    patched |= {f"seam {r.seam.key}": r.patched for r in inspect_seams(seams)}
    if any(patched.values()) and not all(patched.values()):
        bare = ", ".join(name for name, is_patched in patched.items() if not is_patched)
        raise SiteError(
            f"the source patch of this Megatron checkout does not cover {bare}; run "
            "`megatron-dynbatch patch CHECKOUT --revert`, then --apply"
        )


def _warn_if_untested() -> None:
    from megatron.core.package_info import __version__ as version

    if version.partition("+")[0] not in TESTED:
        warnings.warn(
            f"megatron_dynbatch is tested with megatron-core {', '.join(TESTED)}; all "
            f"its sites match in {version}, which is not among them",
            stacklevel=3,
        )
