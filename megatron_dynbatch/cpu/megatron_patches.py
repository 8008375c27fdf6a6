"""What in Megatron itself has to be stood in for on a CPU, one function per stand-in."""

from __future__ import annotations

import copy
import functools
import importlib.util
import warnings
from typing import Any

import torch

from megatron_dynbatch.cpu.async_checkpoint import install_async_checkpoints
from megatron_dynbatch.cpu.inert import nothing
from megatron_dynbatch.cpu.swap import swap

#: Destination of each option whose default cannot work on a CPU, with one that can; docs/cpu.md
#: says what each does to the numbers. Fused activations and dropout stay on: they are plain torch.
CPU_DEFAULTS: dict[str, Any] = {
    "distributed_backend": "gloo",
    "transformer_impl": "local",
    "use_cpu_initialization": True,
    "gradient_accumulation_fusion": False,
    "no_persist_layer_norm": True,
    "masked_softmax_fusion": False,
    "apply_rope_fusion": False,
    "cross_entropy_loss_fusion": False,
    "num_workers": 0,
}


def install_megatron_patches() -> None:
    """Apply all of them; imports megatron.core and megatron.training."""
    _dataset_helpers()
    _no_jit_warmup()
    _packed_attention()
    _partitioned_indices()
    _sequence_parallel_norm()
    _cpu_defaults()
    install_async_checkpoints()
    _remembered_docstrings()


def _remembered_docstrings() -> None:
    """Parse the source of a configuration class once, not each time the parser is built.

    Without it building Megatron's parser takes most of the time of a small training; processes that
    are forked from one that has built it find everything remembered. Megatron 0.17 has no such
    parser.
    """
    try:
        from megatron.training.argument_utils import ArgumentGroupFactory
    except ImportError:
        return
    read = ArgumentGroupFactory._get_field_docstrings
    remembered: dict[type, dict[str, str]] = {}

    @functools.wraps(read)
    def read_once(factory: Any, config_class: type) -> dict[str, str]:
        if config_class not in remembered:
            remembered[config_class] = read(factory, config_class)
        return dict(remembered[config_class])

    swap(ArgumentGroupFactory, "_get_field_docstrings", read_once)


def _dataset_helpers() -> None:
    """Do not end the process when the dataset index helpers cannot be built.

    Megatron runs `make` in its package folder at start-up. Wheels bring the helpers built but no
    Makefile, a checkout needs a compiler and pybind11; in both cases a failed build is exit code 1,
    though data that is not read from indexed files never calls the helpers.
    """
    from megatron.core.datasets import utils

    build = utils.compile_helpers

    @functools.wraps(build)
    def build_if_needed() -> None:
        if importlib.util.find_spec("megatron.core.datasets.helpers_cpp") is not None:
            return
        try:
            build()
        except SystemExit:
            warnings.warn(
                "Megatron's dataset index helpers could not be built (they need a C++ compiler "
                "and pybind11): data sets that read indexed files will not work",
                stacklevel=2,
            )

    swap(utils, "compile_helpers", build_if_needed)


def _no_jit_warmup() -> None:
    """Skip the warm-up of fused kernels, which do not exist here.

    It draws random numbers of the size of a batch from the generator that initialises the weights,
    so that the weights would depend on --seq-length.
    """
    from megatron.training import initialize

    swap(initialize, "_warmup_jit_function", nothing())


def _packed_attention() -> None:
    """Give the local spec an attention that knows packed sequences and context parallelism."""
    from megatron.core.models.backends import LocalSpecProvider

    from megatron_dynbatch.cpu.core_attention import CpuCoreAttention

    swap(LocalSpecProvider, "core_attention", lambda self: CpuCoreAttention)


class _PartitionedIndices:
    """Stands where Megatron expects Transformer Engine's extension module."""

    @staticmethod
    def thd_get_partitioned_indices(
        cu_seqlens: torch.Tensor, total_tokens: int, cp_size: int, cp_rank: int
    ) -> torch.Tensor:
        """Positions of the pack that a context-parallel rank owns.

        Args:
            cu_seqlens: [n+1] cumulative lengths as laid out.
            total_tokens: tokens of the full pack; must be the last of `cu_seqlens`.
            cp_size: context-parallel size.
            cp_rank: rank in it.

        Returns:
            int64 [total_tokens / cp_size].
        """
        from megatron_dynbatch.geometry import zigzag_indices

        if int(cu_seqlens[-1]) != total_tokens:
            raise ValueError(
                f"cu_seqlens ends at {int(cu_seqlens[-1])} but the pack has {total_tokens} tokens; "
                "make the tail padding a sequence of its own"
            )
        return torch.from_numpy(zigzag_indices(cu_seqlens.numpy(), cp_size, cp_rank))


def _partitioned_indices() -> None:
    """Split packed batches over context-parallel ranks without Transformer Engine."""
    from megatron.core import utils

    swap(utils, "tex", _PartitionedIndices)


def _sequence_parallel_norm() -> None:
    """Let torch's norms run under sequence parallelism.

    Megatron asserts against it because torch's norm parameters are not marked for the gradient
    all-reduce over tensor-parallel ranks. They are marked here; unmarked, gradients are several
    per cent off and ranks drift apart.
    """
    from megatron.core.transformer.torch_norm import WrappedTorchNorm

    build = WrappedTorchNorm.__new__

    @functools.wraps(build)
    def build_marked(cls: type, config: Any, *args: Any, **kwargs: Any) -> Any:
        if not config.sequence_parallel:
            return build(cls, config, *args, **kwargs)
        relaxed = copy.copy(config)
        relaxed.sequence_parallel = False
        norm = build(cls, relaxed, *args, **kwargs)
        for parameter in norm.parameters():
            parameter.sequence_parallel = True
        return norm

    swap(WrappedTorchNorm, "__new__", staticmethod(build_marked))


def _cpu_defaults() -> None:
    """Make the options that a CPU run needs the parser's defaults; flags given by the user win.

    sys.argv stays as the user typed it.
    """
    from megatron.training import arguments

    add_arguments = arguments.add_megatron_arguments

    @functools.wraps(add_arguments)
    def add_arguments_for_cpu(parser: Any) -> Any:
        parser = add_arguments(parser)
        known = {action.dest for action in parser._actions}
        missing = sorted(set(CPU_DEFAULTS) - known)
        if missing:
            raise ValueError(
                f"cannot run on CPU: Megatron's parser has no option for {', '.join(missing)} in "
                "this version; use a version from the table of supported versions"
            )
        parser.set_defaults(**CPU_DEFAULTS)
        return parser

    swap(arguments, "add_megatron_arguments", add_arguments_for_cpu)
