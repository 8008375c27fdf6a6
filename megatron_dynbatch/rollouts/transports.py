"""`--rollout-path` to a transport."""

from __future__ import annotations

import os
from urllib.parse import parse_qs, urlsplit

from megatron_dynbatch.errors import OptionError
from megatron_dynbatch.rollouts.checked_paths import checked_path
from megatron_dynbatch.rollouts.directory import RolloutDirectory
from megatron_dynbatch.rollouts.queue import RolloutQueue
from megatron_dynbatch.rollouts.source import RolloutTransport
from megatron_dynbatch.wording import short


def open_transport(
    path: str | os.PathLike[str], *, vocab_size: int | None = None
) -> RolloutTransport:
    """The transport that a path names.

    Args:
        path: `ray://HOST:PORT/NAME` (a Ray cluster; `ray:///NAME` the one that this machine
            belongs to; `?journal=DIR` keeps batches on disk too), `queue:NAME` (this process), or
            a directory.
        vocab_size: Token ids must be below it; None: not checked.

    Raises:
        OptionError: A Ray or queue path without a name, or with an unknown option; another URL; or
            no path.
    """
    text = path if isinstance(path, str) else str(checked_path(path))
    if text.startswith("queue:"):
        name = text.removeprefix("queue:")
        if not name:
            raise OptionError(f"rollout path {text!r}: name the queue, queue:NAME")
        return RolloutQueue.named(name, vocab_size=vocab_size)
    if not text.startswith("ray://"):
        return RolloutDirectory(text, vocab_size=vocab_size)
    name, address, journal = _ray_options(text)
    from megatron_dynbatch.rollouts.ray_transport import RayRollouts

    return RayRollouts(name, address=address, journal=journal, vocab_size=vocab_size)


def _ray_options(text: str) -> tuple[str, str | None, str | None]:
    """Name, address and journal of `ray://HOST:PORT/NAME?journal=DIR`."""
    try:
        parts = urlsplit(text)
        options = parse_qs(parts.query, keep_blank_values=True, strict_parsing=bool(parts.query))
        journals = options.pop("journal", [])
        name = parts.path.strip("/")
        is_right = bool(name) and name.isprintable() and not options and not parts.fragment
    except ValueError:
        is_right = False
    if not is_right or len(journals) > 1:
        raise OptionError(
            f"rollout path {short(text)}: expected ray://HOST:PORT/NAME or ray:///NAME, and "
            "perhaps ?journal=DIR"
        )
    journal = str(checked_path(journals[0])) if journals else None
    return name, parts.netloc or None, journal
