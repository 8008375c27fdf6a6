"""Hooks into ``megatron.training``: one module per seam, `registry` lists them all."""

from typing import TYPE_CHECKING

import megatron_dynbatch._torch  # noqa: F401
from megatron_dynbatch._lazy import names_from
from megatron_dynbatch.hooks.data_iterator import get_batch
from megatron_dynbatch.hooks.installation import install, uninstall
from megatron_dynbatch.hooks.policy import on_batch_needed, on_batch_opened
from megatron_dynbatch.hooks.session import current
from megatron_dynbatch.hooks.sites import SiteError

if TYPE_CHECKING:
    from megatron_dynbatch.integrations.data_iterator import DataIterator, get_data_iterator

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

_HOME = dict.fromkeys(("DataIterator", "get_data_iterator"), "integrations.data_iterator")

__getattr__ = names_from(_HOME, __name__)
