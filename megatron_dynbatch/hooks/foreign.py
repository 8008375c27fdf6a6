"""Look through what other plugins put around a function, and say who they are.

Many plugins wrap a function of Megatron without saying so: a closure or a module variable holds
the original. Whoever keeps the original within reach is taken for a wrapper; whoever does not has
replaced it.
"""

from __future__ import annotations

import functools
import inspect
from collections import deque
from collections.abc import Callable, Iterator
from types import FunctionType, MethodType
from typing import Any

# Wrappers within wrappers; more than anybody stacks, little enough to stay near the function.
_MAX_DEPTH = 12


def find_behind(target: Any, is_wanted: Callable[[Any], bool]) -> Any | None:
    """The nearest object that is wanted: ``target`` itself, or what it wraps, directly or not.

    Args:
        target: What stands in place now.
        is_wanted: Tells whether an object is the one that is looked for.

    Returns:
        The object, or None if ``target`` does not hold on to it.
    """
    waiting: deque[tuple[Any, int]] = deque([(target, 0)])
    seen: set[int] = set()
    while waiting:
        found, depth = waiting.popleft()
        if id(found) in seen:
            continue
        seen.add(id(found))
        if is_wanted(found):
            return found
        if depth < _MAX_DEPTH:
            waiting.extend((inner, depth + 1) for inner in _held(found))
    return None


def _held(wrapper: Any) -> Iterator[Any]:
    """Callables that this one may call: declared, in its closure, in variables of its module."""
    if isinstance(wrapper, functools.partial):
        yield wrapper.func
    if isinstance(wrapper, MethodType | staticmethod | classmethod):
        yield wrapper.__func__
    if hasattr(wrapper, "__wrapped__"):
        yield wrapper.__wrapped__
    if isinstance(wrapper, FunctionType):
        yield from filter(_is_wrapper, _closure(wrapper))
        module = wrapper.__globals__
        yield from filter(_is_wrapper, (module.get(name) for name in wrapper.__code__.co_names))
    elif not isinstance(wrapper, type) and callable(wrapper):
        yield from filter(_is_wrapper, getattr(wrapper, "__dict__", {}).values())


def _closure(function: FunctionType) -> Iterator[Any]:
    for cell in function.__closure__ or ():
        try:
            yield cell.cell_contents
        except ValueError:  # not filled yet
            continue


def _is_wrapper(value: Any) -> bool:
    return callable(value) and not isinstance(value, type)


def describe(found: Any) -> str:
    """Who an object is: its full name and where it was defined."""
    inner = found.func if isinstance(found, functools.partial) else found
    module = getattr(inner, "__module__", None) or type(inner).__module__
    name = getattr(inner, "__qualname__", None) or f"a {type(inner).__qualname__}"
    code = getattr(inner, "__code__", None)
    if code is None:
        return f"{module}.{name}"
    return f"{module}.{name} ({inspect.getfile(code)}:{code.co_firstlineno})"
