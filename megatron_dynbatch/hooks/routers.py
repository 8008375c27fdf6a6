"""What routers count and track, weighted like their losses (see `aux_loss`).

Seams: in Megatron's router the z-loss, the load-balancing losses and the count behind the expert
bias; the trackers of MoE and MTP losses that feed the log lines.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from torch import Tensor

from megatron_dynbatch.hooks.aux_loss import AuxScales, aux_scales
from megatron_dynbatch.hooks.session import session


def _scales() -> AuxScales | None:
    """The factors of the current micro-batch; None outside a training step under the plugin.

    All 0 in a pass that only counts expert frequencies.
    """
    run = session()
    if run is None or run.step is None or run.current is None:
        return None
    return AuxScales() if run.counting else aux_scales(run, run.current_index)


def weighting_z_loss(z_loss: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Wrap `z_loss_func`: a token mean over the micro-batch, not a mean of the ranks' means."""

    @functools.wraps(z_loss)
    def weighted(logits: Tensor, coeff: float, padding_mask: Tensor | None = None) -> Tensor:
        scales = _scales()
        value = z_loss(logits, coeff, padding_mask=padding_mask)
        if scales is None or padding_mask is None:
            return value
        return value * scales.z_loss

    return weighted


def attaching_loss(attach: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Wrap `attach_and_log_load_balancing_loss`: the tokens that per-token loss multiplies by.

    0.19 counts those of all TP·CP ranks where it means the rank's own (a sum that is reduced in
    place), and multiplies by TP·CP once more.
    """

    @functools.wraps(attach)
    def attached(router: Any, *positional: Any, **named: Any) -> Tensor:
        scales = _scales()
        if scales is not None:
            named["valid_token_count"] = scales.router_tokens
        return attach(router, *positional, **named)

    return attached


def counting_experts(count: Callable[..., None]) -> Callable[..., None]:
    """Wrap `_apply_expert_bias`: no dummies, and a mask of the routing map's own shape."""

    @functools.wraps(count)
    def counted(router: Any, routing_map: Tensor, padding_mask: Tensor | None = None) -> None:
        scales = _scales()
        if scales is None:
            return count(router, routing_map, padding_mask=padding_mask)
        if scales.share == 0:
            return None
        if padding_mask is not None:  # 0.19 combines [tokens] with [tokens, experts] and fails
            routing_map = routing_map & ~padding_mask.unsqueeze(-1)
        return count(router, routing_map)

    return counted


def applying_global_loss(apply: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Wrap `_apply_global_aux_loss`: a dummy must not enter its running counts."""

    @functools.wraps(apply)
    def applied(router: Any, probs: Tensor, *positional: Any, **named: Any) -> Tensor:
        scales = _scales()
        if scales is not None and scales.share == 0:
            return probs
        return apply(router, probs, *positional, **named)

    return applied


def tracking_moe(record: Callable[..., None]) -> Callable[..., None]:
    """Wrap `MoEMetricsTracker.record`: log lines show the weighted mean."""

    @functools.wraps(record)
    def recorded(tracker: Any, name: str, value: Tensor, *positional: Any, **named: Any) -> None:
        scales = _scales()
        if scales is not None:
            value = value * scales.moe_log
        record(tracker, name, value, *positional, **named)

    return recorded


def tracking_mtp(static: staticmethod[..., None]) -> staticmethod[..., None]:
    """Wrap `MTPLossLoggingHelper.save_metrics_to_tracker`: log lines show the token mean."""

    save = static.__func__

    @functools.wraps(save)
    def saved(loss: Tensor, *positional: Any, **named: Any) -> None:
        run = session()
        if run is not None and run.counting:
            return
        scales = _scales()
        if scales is not None:
            loss = loss * scales.mtp_log
        save(loss, *positional, **named)

    return staticmethod(saved)
