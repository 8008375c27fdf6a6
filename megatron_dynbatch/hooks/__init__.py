"""Hooks into ``megatron.training``: one module per seam, `registry` lists them all."""

import megatron_dynbatch._torch  # noqa: F401
from megatron_dynbatch.hooks.data_iterator import DataIterator, get_batch, get_data_iterator
from megatron_dynbatch.hooks.installation import install, uninstall
from megatron_dynbatch.hooks.policy import on_batch_needed, on_batch_opened
from megatron_dynbatch.hooks.session import current
from megatron_dynbatch.hooks.sites import SiteError

__all__ = [
    "DataIterator",
    "SiteError",
    "current",
    "get_batch",
    "get_data_iterator",
    "install",
    "on_batch_needed",
    "on_batch_opened",
    "uninstall",
]
