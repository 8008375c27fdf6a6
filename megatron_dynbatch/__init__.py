"""Megatron-LM plugin: every training step has its own global batch size."""

from megatron_dynbatch._version import __version__

__all__ = ["__version__"]
