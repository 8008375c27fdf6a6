"""Imported first by every part that computes with tensors: says how to get torch, where it is not.

Plans, rollouts and most commands work without it.
"""

from megatron_dynbatch.errors import MissingPackage

try:
    import torch  # noqa: F401
except ModuleNotFoundError as error:
    if error.name != "torch":
        raise
    raise MissingPackage(
        "this part of megatron_dynbatch needs torch: pip install 'megatron-dynbatch[torch]' "
        "(with megatron-core: 'megatron-dynbatch[megatron]')",
        name="torch",
    ) from None
