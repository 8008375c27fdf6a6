"""A second plugin, as such plugins are written: it keeps originals in variables and closures."""

from __future__ import annotations

import functools
import importlib
from collections import Counter
from typing import Any

CALLS: Counter[str] = Counter()
TRAINING = "megatron.training.training"

_train_step: Any = None
_saved: dict[tuple[str, str], Any] = {}


def train_step(*args: Any, **kwargs: Any) -> Any:
    """Calls the original, which a variable of this module holds."""
    CALLS["train_step"] += 1
    return _train_step(*args, **kwargs)


def keep_in_variable() -> None:
    """Put `train_step` in place of Megatron's."""
    global _train_step
    training = importlib.import_module(TRAINING)
    _train_step = training.train_step
    training.train_step = train_step


def wrap(*names: str, declared: bool = False, module: str = TRAINING) -> None:
    """Wrap functions of a module of Megatron in closures."""
    home = importlib.import_module(module)
    for name in names:
        original = getattr(home, name)
        _saved[module, name] = original
        wrapper = _closure(name, original)
        setattr(home, name, functools.wraps(original)(wrapper) if declared else wrapper)


def _closure(name: str, original: Any) -> Any:
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        CALLS[name] += 1
        return original(*args, **kwargs)

    return wrapper


class Timed:
    """A wrapper that is an object."""

    def __init__(self, name: str, inner: Any) -> None:
        self.name, self.inner = name, inner

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        CALLS[self.name] += 1
        return self.inner(*args, **kwargs)


def wrap_in_objects(*names: str) -> None:
    """Put objects in place of functions."""
    training = importlib.import_module(TRAINING)
    for name in names:
        setattr(training, name, Timed(name, getattr(training, name)))


def put_back() -> None:
    """Undo `wrap`, whatever others did since."""
    for (module, name), original in _saved.items():
        setattr(importlib.import_module(module), name, original)
    _saved.clear()


def replace(name: str) -> None:
    """Put something else in place, which does not call the original."""

    def replacement(*args: Any, **kwargs: Any) -> Any:
        raise AssertionError("nobody should get here")

    setattr(importlib.import_module(TRAINING), name, replacement)
