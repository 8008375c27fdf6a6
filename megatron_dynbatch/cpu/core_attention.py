"""The attention of `megatron_dynbatch.cpu.attention` as a Megatron core attention module."""

from __future__ import annotations

import contextlib
import math
from typing import Any

import torch
from megatron.core import parallel_state, tensor_parallel
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.module import MegatronModule
from torch import Tensor

from megatron_dynbatch.cpu.attention import batch_attention, packed_causal_attention

_CAUSAL = (AttnMaskType.causal, AttnMaskType.padding_causal)
_MASKED = (AttnMaskType.padding, AttnMaskType.padding_causal, AttnMaskType.arbitrary)


class CpuCoreAttention(MegatronModule):
    """Takes the place of DotProductAttention in the local spec.

    Unlike it, it understands packed sequences (`packed_seq_params`) and context parallelism.
    Same constructor keywords and same forward as Megatron's core attention modules.
    """

    def __init__(
        self,
        config: Any,
        layer_number: int,
        attn_mask_type: AttnMaskType,
        attention_type: str,
        attention_dropout: float | None = None,
        softmax_scale: float | None = None,
        cp_comm_type: str | None = None,
        pg_collection: Any = None,
        **unused: Any,
    ) -> None:
        super().__init__(config=config)
        _refuse_unsupported(config)
        self.attn_mask_type = attn_mask_type
        self.cp_group = getattr(pg_collection, "cp", None)
        if self.cp_group is None and config.context_parallel_size > 1:
            self.cp_group = parallel_state.get_context_parallel_group()
        head_size = config.kv_channels
        self.scale = softmax_scale if softmax_scale is not None else 1.0 / math.sqrt(head_size)
        self.dropout = config.attention_dropout if attention_dropout is None else attention_dropout
        self.window = _window_of(config, layer_number)
        self._add_sink(config, pg_collection)

    def _add_sink(self, config: Any, pg_collection: Any) -> None:
        """One more score per head of this rank: none, 0, or learnt."""
        kind = getattr(config, "softmax_type", "vanilla")
        group = getattr(pg_collection, "tp", None)
        size = group.size() if group is not None else config.tensor_model_parallel_size
        heads = torch.zeros(config.num_attention_heads // size, dtype=config.params_dtype)
        self.softmax_offset: Tensor | None = None
        if kind == "off-by-one":
            self.softmax_offset = heads
        elif kind == "learnable":
            del self.softmax_offset
            offset = torch.nn.Parameter(heads)
            if config.perform_initialization:
                config.init_method(offset)
            tensor_parallel.set_tensor_model_parallel_attributes(offset, True, 0, 1)
            self.register_parameter("softmax_offset", offset)

    def sharded_state_dict(
        self,
        prefix: str = "",
        sharded_offsets: tuple[tuple[int, int, int], ...] = (),
        metadata: dict[str, Any] | None = None,
    ) -> Any:
        """The learnt score of each head, split over tensor-parallel ranks."""
        from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint

        own = self.state_dict(prefix="", keep_vars=True)
        return make_sharded_tensors_for_checkpoint(
            own, prefix, {"softmax_offset": 0}, sharded_offsets
        )

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        attn_mask_type: AttnMaskType | None = None,
        attention_bias: Tensor | None = None,
        packed_seq_params: Any = None,
        **unused: Any,
    ) -> Tensor:
        """Attend; THD [t, heads, d] with `packed_seq_params`, otherwise [s, b, heads, d]."""
        if attention_bias is not None:
            raise ValueError("the CPU attention has no attention bias; remove the option for it")
        kind = attn_mask_type if attn_mask_type is not None else self.attn_mask_type
        dropout = self.dropout if self.training else 0.0
        with self._random_state(dropout):
            if packed_seq_params is not None:
                return packed_causal_attention(
                    query,
                    key,
                    value,
                    _laid_out_lengths(packed_seq_params),
                    scale=self.scale,
                    cp_group=self._group_of(packed_seq_params),
                    dropout=dropout,
                    window=self.window,
                    sink=self.softmax_offset,
                )
            if self.config.context_parallel_size > 1:
                raise ValueError(
                    "the CPU attention needs packed sequences (--sft) with "
                    "--context-parallel-size > 1; set it to 1 for ordinary batches"
                )
            return batch_attention(
                query,
                key,
                value,
                attention_mask if kind in _MASKED else None,
                causal=kind in _CAUSAL,
                scale=self.scale,
                dropout=dropout,
                window=self.window,
                sink=self.softmax_offset,
            )

    def _group_of(self, packed_seq_params: Any) -> Any:
        # Hybrid context parallelism gives each micro-batch a group of its own.
        group = getattr(packed_seq_params, "cp_group", None)
        group = group if group is not None else self.cp_group
        return group if group is not None and group.size() > 1 else None

    def _random_state(self, dropout: float) -> contextlib.AbstractContextManager[Any]:
        """Megatron's rule: TP ranks drop different weights, unless sequence parallel."""
        if dropout == 0.0 or self.config.sequence_parallel:
            return contextlib.nullcontext()
        return tensor_parallel.get_cuda_rng_tracker().fork()


def _laid_out_lengths(packed_seq_params: Any) -> Tensor:
    """The cumulative lengths that the memory follows: the padded ones where they are given."""
    padded = packed_seq_params.cu_seqlens_q_padded
    return padded if padded is not None else packed_seq_params.cu_seqlens_q


def _window_of(config: Any, layer_number: int) -> int | None:
    """How many earlier tokens a token of this layer sees; None: all of them."""
    if getattr(config, "window_size", None) is None:
        return None
    from megatron.core.transformer.utils import is_layer_window_attention

    if not is_layer_window_attention(
        config.window_size, config.window_attn_skip_freq, layer_number
    ):
        return None
    left = int(config.window_size[0])
    return left if left >= 0 else None


def _refuse_unsupported(config: Any) -> None:
    """Say at model construction what this attention does not do."""
    if getattr(config, "qk_clip", False):
        raise ValueError("the CPU attention has no QK clipping; remove --qk-clip")
