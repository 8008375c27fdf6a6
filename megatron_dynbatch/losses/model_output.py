"""Runs Megatron's model on a micro-batch so that the loss has the least memory to move.

Logits come in the model's own precision: Megatron's `Float16Module` would copy them to float32,
which `vocab_parallel_logprob_entropy` does not need. With `ChunkedHead` there are no logits at all:
the model returns log-probs and entropy, computed from its hidden states a few rows at a time.
"""

import inspect
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_dynbatch.layout import MicroBatch
from megatron_dynbatch.logprob import EntropyMode, chunked_head_logprob_entropy


@dataclass(frozen=True)
class ChunkedHead:
    """How log-probs are made inside the model, instead of logits.

    Attributes:
        temperature: As the loss is given it.
        entropy: "none", "metric" or "grad", at least what the loss needs.
        vocab_size: As the loss is given it.
        tp_group: Tensor-parallel group.
        rows_per_chunk: Rows whose logits exist at once.
    """

    temperature: float = 1.0
    entropy: EntropyMode = "none"
    vocab_size: int | None = None
    tp_group: dist.ProcessGroup | None = None
    rows_per_chunk: int = 1024


def model_output(
    model: torch.nn.Module,
    microbatch: MicroBatch,
    *,
    chunked_head: ChunkedHead | None = None,
    **arguments: Any,
) -> Tensor:
    """What the losses take, from a GPTModel in whatever wrappers Megatron has put around it.

    Args:
        model: As Megatron's schedule hands it to `forward_step`.
        microbatch: Its input.
        chunked_head: Compute log-probs inside the model, a few rows at a time; needs megatron-core
            0.18 or newer.
        **arguments: Further arguments of `GPTModel.forward`, such as `loss_mask` or `padding_mask`.

    Returns:
        On the last pipeline stage logits [1, T_local, V/tp], bfloat16 where the model is; with
        `chunked_head` log-probs and entropy, float32 [2, T_local], for `token_log_probs`. On other
        stages what the stage hands on.

    Raises:
        ValueError: A chunked head and a model that does not allow one.
    """
    if chunked_head is not None:
        inner = _unwrapped(model)
        if "output_processor" not in inspect.signature(inner.forward).parameters:
            raise ValueError(
                f"a chunked head needs `output_processor` of GPTModel.forward (megatron-core 0.18 "
                f"or newer); {type(inner).__name__}.forward does not have it"
            )
        arguments["output_processor"] = _log_probs_of_hidden_states
        arguments["output_processor_context"] = chunked_head, microbatch
    if _upcasts(model):
        arguments["fp32_output"] = False
    return model(
        microbatch.tokens,
        microbatch.position_ids,
        None,
        packed_seq_params=microbatch.packed_seq_params(),
        **arguments,
    )


def _wrappers(model: torch.nn.Module) -> list[torch.nn.Module]:
    """The model and what it wraps, outermost first (DistributedDataParallel, Float16Module, …)."""
    chain = [model]
    while isinstance(inner := getattr(chain[-1], "module", None), torch.nn.Module):
        chain.append(inner)
    return chain


def _unwrapped(model: torch.nn.Module) -> torch.nn.Module:
    return _wrappers(model)[-1]


def _upcasts(model: torch.nn.Module) -> bool:
    from megatron.core.transformer.module import Float16Module

    return any(isinstance(wrapper, Float16Module) for wrapper in _wrappers(model))


def _log_probs_of_hidden_states(
    *,
    hidden_states: Tensor,
    output_layer: Any,
    output_weight: Tensor | None,
    context: tuple[ChunkedHead, MicroBatch],
    config: Any,
    **_: Any,
) -> Tensor:
    """What GPTModel calls in place of its output layer: hidden [S, 1, H] → [2, T_local]."""
    head, microbatch = context
    if getattr(output_layer, "bias", None) is not None or getattr(config, "use_mup", False):
        raise ValueError("a chunked head knows neither a bias of the output layer nor muP")
    if config.sequence_parallel:
        from megatron.core.tensor_parallel import gather_from_sequence_parallel_region

        hidden_states = gather_from_sequence_parallel_region(
            hidden_states, tensor_parallel_output_grad=True, group=head.tp_group
        )
    weight = output_layer.weight if output_weight is None else output_weight
    log_probs, entropy = chunked_head_logprob_entropy(
        hidden_states,
        weight,
        microbatch.labels,
        mask=microbatch.loss_mask,
        rows=torch.from_numpy(microbatch.segments.positions).to(weight.device, non_blocking=True),
        temperature=head.temperature,
        entropy=head.entropy,
        tp_group=head.tp_group,
        vocab_size=head.vocab_size,
        rows_per_chunk=head.rows_per_chunk,
        reduce_hidden_gradient=not config.sequence_parallel,
    )
    output = torch.stack([log_probs, torch.zeros_like(log_probs) if entropy is None else entropy])
    output.chunked_head = head  # type: ignore[attr-defined]
    return output


def of_chunked_head(
    output: Tensor, temperature: float, entropy: EntropyMode, vocab_size: int | None
) -> tuple[Tensor, Tensor | None]:
    """logp and entropy [T_local] of a model that ran with `ChunkedHead`.

    Raises:
        ValueError: The head was made with other options than the loss asks for.
    """
    head = getattr(output, "chunked_head", None)
    asked = (temperature, vocab_size)
    if head is None or (head.temperature, head.vocab_size) != asked:
        raise ValueError(
            f"the loss asks for temperature {temperature} and vocab_size {vocab_size}, but the "
            f"log-probs in the model's output were made with {head}"
        )
    if entropy != "none" and head.entropy not in ("grad", entropy):
        raise ValueError(f"the loss asks for entropy {entropy!r}, but the model ran with {head}")
    values = output[1] if entropy == "grad" else output[1].detach()
    return output[0], None if entropy == "none" else values
