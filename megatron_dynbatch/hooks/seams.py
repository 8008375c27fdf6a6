"""Seams: functions of Megatron that are wrapped where they are looked up.

A hooked function stays in place as long as nobody else touches it. Whoever wraps it later keeps
working when the plugin is switched off: the hook then only passes calls through.
"""

from __future__ import annotations

import functools
import importlib
import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from megatron_dynbatch.hooks.foreign import describe, find_behind
from megatron_dynbatch.hooks.sites import SiteError


@dataclass(frozen=True, slots=True)
class Seam:
    """An attribute of a module (``name``) or of a class (``Class.name``) that we wrap.

    Attributes:
        module: Where it is.
        attribute: Its name.
        wrap: Makes the replacement from the original.
        since: First (major, minor) version of megatron-core that has it; older ones do without.
        why: What goes wrong without.
        until: What Megatron would have to offer to make this unnecessary, with a link if it is
            being discussed.
    """

    module: str
    attribute: str
    wrap: Callable[[Any], Any]
    since: tuple[int, int] = (0, 0)
    why: str = ""
    until: str = ""

    @property
    def key(self) -> str:
        """``module:attribute``, as source patches name it."""
        return f"{self.module}:{self.attribute}"


@dataclass(frozen=True, slots=True)
class SeamReport:
    """What stands at one seam.

    Attributes:
        seam: Which one.
        where: Name and place of the function that is in place.
        patched: Whether a source patch put our hook there.
        wrapped_by: Who stands there, if neither Megatron nor we.
        problem: What is wrong, if anything.
    """

    seam: Seam
    where: str
    patched: bool
    wrapped_by: str | None
    problem: str | None


@dataclass(slots=True)
class _Hook:
    """State of one hooked function."""

    key: str
    in_source: bool
    active: bool = True


def hooked(key: str, original: Any, find_wrap: Callable[[], Any], in_source: bool = False) -> Any:
    """``original`` behind our wrapper, which can be switched off.

    Args:
        key: The seam's key.
        original: Function or static method.
        find_wrap: Called at the first call; returns the seam's ``wrap``.
        in_source: Whether a source patch put it there.
    """
    is_static = isinstance(original, staticmethod)
    function = original.__func__ if is_static else original
    hook = _Hook(key, in_source)

    @functools.cache
    def replacement() -> Any:
        wrapped = find_wrap()(original)
        return wrapped.__func__ if is_static else wrapped

    @functools.wraps(function)
    def call(*positional: Any, **named: Any) -> Any:
        return (replacement() if hook.active else function)(*positional, **named)

    call.__dynbatch_hook__ = hook  # type: ignore[attr-defined]
    return staticmethod(call) if is_static else call


def _own_hook(found: Any) -> _Hook | None:
    # functools.wraps of another plugin copies our attributes to its own wrapper.
    if getattr(found, "__code__", None) is not _CALL_CODE:
        return None
    return getattr(found, "__dynbatch_hook__", None)


_CALL_CODE = hooked("", lambda: None, lambda: None).__code__


def _owner(seam: Seam) -> tuple[Any, str]:
    """The module or class that has the attribute, and the attribute's name there."""
    owner: Any = importlib.import_module(seam.module)
    *classes, name = seam.attribute.split(".")
    for class_name in classes:
        owner = getattr(owner, class_name)
    return owner, name


def _current(seam: Seam) -> Any:
    try:
        # A static method is kept as such, so that it can be put back.
        return inspect.getattr_static(*_owner(seam))
    except AttributeError:
        raise SiteError(
            f"{seam.module} has no {seam.attribute}; this Megatron is not supported"
        ) from None


def _find_hook(seam: Seam) -> _Hook | None:
    """Our hook at this seam, also if somebody stands around it."""

    def is_ours(found: Any) -> bool:
        hook = _own_hook(found)
        return hook is not None and hook.key == seam.key

    found = find_behind(_current(seam), is_ours)
    return None if found is None else _own_hook(found)


def inspect_seams(seams: Sequence[Seam]) -> list[SeamReport]:
    """Look at every seam in the installed Megatron; changes nothing."""
    reports = []
    for seam in seams:
        try:
            current, hook = _current(seam), _find_hook(seam)
        except (SiteError, ImportError) as error:
            reports.append(SeamReport(seam, "?", False, None, str(error)))
            continue
        original = inspect.unwrap(getattr(current, "__func__", current))
        in_place = getattr(current, "__func__", current)
        foreign = None
        if _own_hook(in_place) is None and not _is_megatrons(in_place):
            foreign = describe(in_place)
        patched = hook is not None and hook.in_source
        reports.append(SeamReport(seam, describe(original), patched, foreign, None))
    return reports


def _is_megatrons(function: Any) -> bool:
    # A wrapper that declares what it wraps has the original's module name, not its globals.
    home = getattr(function, "__globals__", {}).get("__name__", "megatron")
    return home.partition(".")[0] in ("megatron", "torch")  # torch.compile's wrappers


# What we put in place: the attribute before, and after.
_INSTALLED: dict[Seam, tuple[Any, Any]] = {}


def install_seams(seams: Sequence[Seam]) -> None:
    """Hook every seam that is not hooked yet.

    Raises:
        SiteError: A seam is missing; nothing was changed.
    """
    hooks = {seam: _find_hook(seam) for seam in seams}
    for seam, hook in hooks.items():
        if hook is not None:
            hook.active = True
            continue
        original = _current(seam)
        ours = hooked(seam.key, original, functools.partial(getattr, seam, "wrap"))
        setattr(*_owner(seam), ours)
        _INSTALLED[seam] = (original, ours)


def seams_out_of_place(seams: Sequence[Seam]) -> list[str]:
    """Which seams lost their hook since it was installed, one line each."""
    return [
        f"{seam.module}.{seam.attribute} lost its hook: its module was loaded again, or "
        f"{describe(_current(seam))} replaced it"
        for seam in seams
        if _find_hook(seam) is None
    ]


def uninstall_seams() -> None:
    """Put back what stood there; a hook that somebody wrapped is switched off instead."""
    for seam, (original, ours) in _INSTALLED.items():
        if _current(seam) is ours:
            setattr(*_owner(seam), original)
        hook = _own_hook(getattr(ours, "__func__", ours))
        assert hook is not None
        hook.active = False
    _INSTALLED.clear()
