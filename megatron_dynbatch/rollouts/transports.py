"""`--rollout-path` to a transport."""

from __future__ import annotations

import os
from urllib.parse import parse_qs, urlsplit

from megatron_dynbatch.errors import OptionError
from megatron_dynbatch.rollouts.directory import RolloutDirectory
from megatron_dynbatch.rollouts.queue import RolloutQueue
from megatron_dynbatch.rollouts.source import RolloutTransport


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
        OptionError: A Ray or queue path without a name, or with an unknown option.
    """
    text = os.fspath(path)
    if text.startswith("queue:"):
        name = text.removeprefix("queue:")
        if not name:
            raise OptionError(f"rollout path {text!r}: name the queue, queue:NAME")
        return RolloutQueue.named(name, vocab_size=vocab_size)
    if not text.startswith("ray://"):
        return RolloutDirectory(text, vocab_size=vocab_size)
    from megatron_dynbatch.rollouts.ray_transport import RayRollouts

    parts = urlsplit(text)
    options = parse_qs(parts.query)
    name = parts.path.strip("/")
    if not name or set(options) - {"journal"}:
        raise OptionError(
            f"rollout path {text!r}: expected ray://HOST:PORT/NAME or ray:///NAME, and perhaps "
            "?journal=DIR"
        )
    return RayRollouts(
        name,
        address=parts.netloc or None,
        journal=options.get("journal", [None])[0],
        vocab_size=vocab_size,
    )
