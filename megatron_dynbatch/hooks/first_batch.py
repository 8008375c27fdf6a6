"""The first step shows whether the script keeps to what a batch is; no rank hangs if it does not.

A batch holds packed samples of a decoder: there are no other keys in it, and the model must be told
where the samples end. Ranks that wait in a collective for the one that met the fault hear of it
from the job's store and end with its sentence. From the second step on nothing of this remains.
"""

from __future__ import annotations

import ast
import contextlib
import inspect
import linecache
import os
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields
from types import TracebackType
from typing import Any

from torch import Tensor, nn

from megatron_dynbatch.errors import BatchContractError, DynbatchError
from megatron_dynbatch.hooks.session import Session, session
from megatron_dynbatch.layout import MicroBatch
from megatron_dynbatch.steps import Exchange, RankFailure

# Hybrid ones read the same batches; their model has a refusal of its own, `hybrid-layers`.
_SUPPORTED = "batches are those of GPT and hybrid decoder models"
_POLL_SECONDS = 0.2
# How long a rank that has heard of the fault may take to raise it by itself.
_GRACE_SECONDS = 3.0


class StockBatch(dict[str, Any]):
    """A batch whose missing keys can be told from those of other dictionaries."""

    def __missing__(self, key: str) -> Any:
        raise MissingKey(key)


class MissingKey(KeyError):
    """A key that the batch does not have; scripts may catch it."""


@contextlib.contextmanager
def checking_first_batch(run: Session, model: Any) -> Iterator[None]:
    """Context of a step's forward and backward passes; looks at the first step of a run.

    Raises:
        BatchContractError: The script wants another batch, or hands too little of it to the model.
    """
    if run.has_first_batch:
        yield
        return
    exchange = run.feed.exchange
    hooks = [part.register_forward_pre_hook(_check_call, with_kwargs=True)
             for part in language_models(model)]  # fmt: skip
    watch = _Watch(exchange)
    try:
        yield
    except DynbatchError as error:
        watch.end()
        if exchange.failure() is None:  # else another rank told of it first
            exchange.fail(error)
        raise
    except Exception as error:
        # A collective whose peer has gone says nothing of why; the rank that ended has.
        if (failure := exchange.failure()) is not None:
            raise RankFailure(failure) from error
        raise
    finally:
        watch.end()
        for hook in hooks:
            hook.remove()
    run.has_first_batch = True


@contextlib.contextmanager
def naming_missing_keys() -> Iterator[None]:
    """Context of the script's forward step.

    Raises:
        BatchContractError: It asked its batch for something that is not there.
    """
    try:
        yield
    except KeyError as error:
        batch = _batch_without(error)
        if batch is None:
            raise
        raise BatchContractError(
            f"the forward step asks its batch for {error.args[0]!r}, which is not there; a batch "
            f"has {', '.join(batch)}: {_SUPPORTED}"
        ) from error
    except AttributeError as error:
        if not isinstance(error.obj, MicroBatch):
            raise
        there = [field.name for field in fields(MicroBatch) if not field.name.startswith("_")]
        raise BatchContractError(
            f"the forward step asks its micro-batch for {error.name!r}, which is not there; a "
            f"micro-batch has {', '.join(there)}: {_SUPPORTED}"
        ) from error


def _batch_without(error: KeyError) -> Sequence[str] | None:
    """The keys of the batch, or of a copy that the script made, that the error is about."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    if trace is None or not error.args:
        return None
    if isinstance(error, MissingKey):
        return list(trace.tb_frame.f_locals["self"])
    asked = _subscripted(trace)
    is_copy = isinstance(asked, Mapping) and {"tokens", "cu_seqlens"} <= asked.keys()
    return list(map(str, asked)) if is_copy else None


def _subscripted(trace: TracebackType) -> Any:
    """What stands before the brackets of the expression that failed, if it is a variable."""
    frame = trace.tb_frame
    line, _, start, end = list(frame.f_code.co_positions())[trace.tb_lasti // 2]
    text = linecache.getline(frame.f_code.co_filename, line or 0).encode()[start:end].decode()
    try:
        expression = ast.parse(text.strip(), mode="eval").body
    except SyntaxError:  # it stands on several lines
        return None
    if not isinstance(expression, ast.Subscript) or not isinstance(expression.value, ast.Name):
        return None
    return {**frame.f_globals, **frame.f_locals}.get(expression.value.id)


def language_models(model: Any) -> Iterator[nn.Module]:
    """Megatron's language models in these model chunks, wherever a script has put them."""
    from megatron.core.models.common.language_module.language_module import LanguageModule

    for chunk in model if isinstance(model, list) else [model]:
        yield from (part for part in chunk.modules() if isinstance(part, LanguageModule))


def _check_call(model: Any, positional: tuple[Any, ...], named: dict[str, Any]) -> None:
    """Look at what the script hands to the model: a forward pre-hook."""
    run = session()
    if run is None or run.current is None:
        return
    name, signature = type(model).__name__, inspect.signature(model.forward)
    if "packed_seq_params" not in signature.parameters:
        raise BatchContractError(
            f"{name} takes no packed_seq_params, so it cannot keep the samples of a micro-batch "
            f"apart: {_SUPPORTED}"
        )
    given = signature.bind_partial(*positional, **named).arguments
    packing = given.get("packed_seq_params")
    if packing is None:
        raise BatchContractError(
            f"the forward step calls {name} without packed_seq_params, and its attention would "
            "look across samples; pass batch.packed_seq_params(), or in a stock script "
            "PackedSeqParams made of the batch's cu_seqlens and max_seqlen"
        )
    padded = packing.cu_seqlens_q_padded
    ends = _ends(packing.cu_seqlens_q if padded is None else padded)
    own_ends = _ends(run.current.cu_seqlens_padded)
    if not set(own_ends) <= set(ends):
        raise BatchContractError(
            f"the forward step tells {name} that sequences end at {_shown(ends)}, but those of the "
            f"micro-batch end at {_shown(own_ends)}; pass the batch's own cu_seqlens"
        )
    positions = getattr(model, "position_embedding_type", None)
    takes_tokens = getattr(model, "pre_process", True) and given.get("decoder_input") is None
    if positions == "learned_absolute" and takes_tokens and given.get("position_ids") is None:
        raise BatchContractError(
            f"the forward step calls {name}, which learns positions, without position_ids; pass "
            "those of the batch, which start anew with each sample"
        )


def _ends(cu_seqlens: Tensor) -> list[int]:
    return cu_seqlens.reshape(-1).tolist()


def _shown(ends: list[int]) -> str:
    return ", ".join(map(str, ends[:8])) + (", …" if len(ends) > 8 else "")


class _Watch:
    """A thread that ends this process when another rank has failed and this one does not notice.

    The main thread may stand in a collective that the failed rank never joins; no exception reaches
    it there.
    """

    def __init__(self, exchange: Exchange) -> None:
        self._exchange = exchange
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._look, name="first batch", daemon=True)
        if exchange.world_size > 1:
            self._thread.start()

    def end(self) -> None:
        """Look no more."""
        self._ended.set()
        if self._thread.is_alive():
            self._thread.join()

    def _look(self) -> None:
        while not self._ended.wait(_POLL_SECONDS):
            failure = self._exchange.failure()
            if failure is None:
                continue
            # At once: the launcher ends this process when the one that failed has exited.
            print(f"RankFailure: {failure}", file=sys.stderr, flush=True)
            if self._ended.wait(_GRACE_SECONDS):
                return
            os._exit(1)
