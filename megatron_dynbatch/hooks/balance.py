"""Load-balancing losses that no packing changes: of each sample, and over the whole step.

With E experts, K of them for a token, n_e routed tokens and p_e router probabilities:

    seq_aux_loss   (1/S) Σ_i E / (K·T_i²) · Σ_e n_ie · Σ_{t in i} p_te, over the step's S samples of
                   T_i tokens; Megatron would take a pack for one sequence
    aux_loss       E/K · Σ_e f_e · (1/T) Σ_t p_te over the step's T tokens under `--moe-balance
                   previous-step` or `same-step`, with f_e = n_e / T of that whole step; linear in
                   tokens. Megatron takes f of each micro-batch (`micro-batch`, the default)

Seams: the two methods of Megatron's router, and `routing` for the counts of a forward-only pass.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from megatron_dynbatch.errors import ResumeError
from megatron_dynbatch.hooks.aux_loss import aux_scales, router_values
from megatron_dynbatch.hooks.padding import router_part
from megatron_dynbatch.hooks.session import Session, session


def applying_sequence_loss(apply: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Wrap `_apply_seq_aux_loss`: the mean over samples of each one's own term."""

    @functools.wraps(apply)
    def applied(
        router: Any, probs: Tensor, scores: Tensor, routing_map: Tensor, *rest: Any, **named: Any
    ) -> Tensor:
        run = session()
        if run is None or run.step is None or run.current is None:
            return apply(router, probs, scores, routing_map, *rest, **named)
        coefficient = router.get_aux_loss_coeff("seq_aux_loss")
        scales = aux_scales(run, run.current_index)
        if coefficient == 0 or scales.share == 0:
            return probs
        loads, masses, lengths = _by_sample(run, router, scores, routing_map)
        experts, topk = scores.shape[-1], router.topk
        terms = (loads * masses).sum(-1) * experts / (topk * lengths.to(scores.dtype) ** 2)
        # All terms of a micro-batch are weighted by its share of tokens; this one counts samples.
        of_step = terms.sum() / len(run.step.step_plan.samples) / scales.share
        return router.attach_and_log_load_balancing_loss(
            probs, coefficient, coefficient * of_step, "seq_load_balancing_loss",
            router.tp_cp_group,
        )  # fmt: skip

    return applied


def _by_sample(
    run: Session, router: Any, scores: Tensor, routing_map: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Tokens that each expert got of each sample [B, E], this rank's probabilities [B, E], T [B].

    Rows of padding are zero in both inputs, so it does not matter which sample has them.
    """
    if run.current_index not in run.samples_of_tokens:  # once for all layers
        run.samples_of_tokens[run.current_index] = _samples_of_tokens(run, scores.device)
    sample, lengths = run.samples_of_tokens[run.current_index]
    empty = scores.new_zeros(len(lengths), scores.shape[-1])
    loads = empty.index_add(0, sample, routing_map.to(scores.dtype).detach())
    if router.tp_cp_group.size() > 1:
        torch.distributed.all_reduce(loads, group=router.tp_cp_group)
    return loads, empty.index_add(0, sample, scores), lengths


def _samples_of_tokens(run: Session, device: torch.device) -> tuple[Tensor, Tensor]:
    """Place in the pack of the sample of each token that routers see, and T of each sample."""
    assert run.step is not None
    packed = run.step.packed(run.current_index)
    lengths = packed.pack.total_lengths
    own = router_values(run, packed, packed.pack.sample_of_row.clip(max=len(lengths) - 1))
    return torch.from_numpy(own).to(device), torch.from_numpy(lengths).to(device)


def applying_balance_loss(apply: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Wrap `_apply_aux_loss`: expert frequencies of a whole step under `--moe-balance`."""

    @functools.wraps(apply)
    def applied(
        router: Any, probs: Tensor, scores: Tensor, routing_map: Tensor, **named: Any
    ) -> Tensor:
        run = session()
        if run is None or run.step is None or run.current is None or run.balance is None:
            return apply(router, probs, scores, routing_map, **named)
        coefficient = router.get_aux_loss_coeff("aux_loss")
        scales = aux_scales(run, run.current_index)
        if coefficient == 0 or scales.share == 0:
            return probs
        balance: StepBalance = run.balance
        if not balance.from_same_step:  # gradients are on once for each token, recompute or not
            balance.count(router, routing_map)
        frequencies = balance.frequencies(router).to(scores.device, scores.dtype)
        tokens = scales.share * run.step.num_tokens
        value = (scores.sum(0) * frequencies).sum() * (scores.shape[-1] / router.topk / tokens)
        return router.attach_and_log_load_balancing_loss(
            probs, coefficient, coefficient * value, "load_balancing_loss", router.tp_cp_group
        )

    return applied


def routing_counted(route: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap `routing`: the padding of MTP layers, and what a pass that counts is there for.

    Megatron shifts the mask with the tokens, so that the last token of a sample is padding in an
    MTP layer if padding follows it, and not if nothing does: a question of the layout.
    """

    @functools.wraps(route)
    def routed(
        router: Any, logits: Tensor, padding_mask: Tensor | None = None, **named: Any
    ) -> Any:
        run = session()
        if run is None or run.step is None or run.current is None or run.current.is_dummy:
            return route(router, logits, padding_mask=padding_mask, **named)
        if padding_mask is not None and router.is_mtp_layer:
            padding_mask = router_part(run, run.current.padding_mask)
        if run.counting:
            from megatron.core.transformer.moe.moe_utils import compute_routing_scores_for_aux_loss

            routing_map, _ = compute_routing_scores_for_aux_loss(
                logits.view(-1, logits.shape[-1]), router.topk, router.score_function,
                fused=router.config.moe_router_fusion,
            )  # fmt: skip
            kept = ~router_part(run, run.current.padding_mask).reshape(-1, 1)
            run.balance.count(router, routing_map & kept)
        return route(router, logits, padding_mask=padding_mask, **named)

    return routed


class StepBalance:
    """Expert frequencies of a step, per layer, the same on every rank.

    Args:
        num_layers: Layers, those of MTP too.
        num_experts: E.
        topk: K.
        from_same_step: Whether they are counted before the step trains, not after.
        saved: `to_dict` of a checkpoint.

    Raises:
        ResumeError: `saved` is of another model.
    """

    def __init__(
        self,
        num_layers: int,
        num_experts: int,
        topk: int,
        *,
        from_same_step: bool,
        saved: Mapping[str, Any] | None = None,
    ) -> None:
        self.from_same_step = from_same_step
        self._uniform = torch.full((num_experts,), topk / num_experts, dtype=torch.float64)
        self._topk = topk
        self._counts = torch.zeros(num_layers, num_experts, dtype=torch.int64)
        self._known: Tensor | None = None
        self._tokens = 0
        if saved is not None and not from_same_step:
            self._known = torch.tensor(saved["counts"], dtype=torch.int64)
            self._tokens = int(saved["tokens"])
            if self._known.shape != self._counts.shape:
                raise ResumeError(
                    f"the checkpoint has expert counts of {list(self._known.shape)} layers and "
                    f"experts, this model {list(self._counts.shape)}; load it with --finetune to "
                    "begin without them"
                )

    def begin(self) -> None:
        """Count from 0, also where a step is run again."""
        self._counts.zero_()

    def count(self, router: Any, routing_map: Tensor) -> None:
        """Add this rank's tokens of one micro-batch.

        Args:
            router: Whose layer it is.
            routing_map: [T, E], False at padding.
        """
        self._counts = self._counts.to(routing_map.device)
        self._counts[_layer_of(router)] += routing_map.sum(0)

    def frequencies(self, router: Any) -> Tensor:
        """f_e = n_e / T, [E] float64; K/E before anything was counted."""
        if self._known is None:
            return self._uniform
        return self._known[_layer_of(router)].double() / self._tokens

    def settle(self, tokens: int, device: torch.device) -> None:
        """Let what was counted hold from now on; collective over all ranks.

        Args:
            tokens: T of the step that was counted.
            device: Where the collective runs.
        """
        counts = self._counts.to(device, copy=True)
        torch.distributed.all_reduce(counts)  # a layer is on one stage, a token on one rank of it
        routed = set(counts.sum(-1).tolist()) - {0}  # 0: a dense layer
        assert routed <= {self._topk * tokens}, (
            f"{sorted(routed)} routed tokens were counted in a step of {tokens} with {self._topk} "
            "experts each"
        )
        self._known, self._tokens = counts, tokens

    def to_dict(self) -> dict[str, Any]:
        """Plain values for a checkpoint."""
        assert self._known is not None
        return {"tokens": self._tokens, "counts": self._known.tolist()}


def _layer_of(router: Any) -> int:
    """As Megatron's log counts layers: those of MTP last."""
    return int(router.layer_number) - 1 + (router.config.num_layers if router.is_mtp_layer else 0)


def step_balance(run: Session) -> StepBalance | None:
    """What `--moe-balance` asks for; None as in Megatron."""
    options = run.options
    if not options.num_experts or options.moe_balance == "micro-batch":
        return None
    return StepBalance(
        options.num_layers + options.mtp_num_layers,
        options.num_experts,
        options.moe_router_topk,
        from_same_step=options.moe_balance == "same-step",
        saved=run.live_args.balance,
    )


def begin_balance(
    run: Session, schedule: Callable[..., Any], forward_step: Callable[..., Any], named: Any
) -> None:
    """Before a step trains: count from 0, or count all of it by a forward-only pass.

    Args:
        run: The session, with an open step.
        schedule: Megatron's forward-backward function.
        forward_step: The script's, which selects the micro-batch first.
        named: The schedule's other arguments.
    """
    if run.balance is None:
        run.balance = step_balance(run)
    if run.balance is None:
        return
    run.balance.begin()
    if not run.balance.from_same_step:
        return
    from megatron_dynbatch.hooks.data_iterator import StockBatchIterator

    given = named["data_iterator"]
    own: Any = StockBatchIterator()
    if isinstance(given, list):  # one per model chunk
        own = [StockBatchIterator() for _ in given]

    def forward(iterator: Any, model: Any, *rest: Any) -> tuple[Tensor, Any]:
        output, _ = forward_step(iterator, model, *rest)
        zero = torch.zeros((), dtype=torch.int, device=output.device)
        return output, lambda output: (output.new_zeros(()), zero, {})

    run.counting = True
    try:
        options = {**named, "data_iterator": own, "forward_only": True}
        schedule(forward_step_func=forward, **options)
    finally:
        run.counting = False
    assert run.step is not None
    run.balance.settle(run.step.num_tokens, run.step.device)


def keep_balance(run: Session) -> None:
    """After a successful update: the step's frequencies hold for the next one, and are saved."""
    if run.balance is None or run.step is None:
        return
    if not run.balance.from_same_step:
        run.balance.settle(run.step.num_tokens, run.step.device)
    run.live_args.balance = run.balance.to_dict()
