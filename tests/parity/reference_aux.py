"""Auxiliary losses of the independent loop: closed forms over a whole step.

With T tokens in the step, padding never among them:

    z-loss           coefficient · (1/T) Σ_tokens (log Σ_e exp(logit_e))², added up over layers
    load balancing   Σ_k (t_k/T) · coefficient · E / (K·t_k²) · Σ_e n_ke · Σ_{tokens of k} p_e,
                     over micro-batches k of t_k tokens: a product of means of each
    over the step    coefficient · E / K · Σ_e f_e · (1/T) Σ_tokens p_e, f_e = tokens of expert e
                     over all tokens, in the previous step (K/E at first) or in this one
    per sample       coefficient · (1/S) Σ_i E / (K·T_i²) · Σ_e n_ie · Σ_{tokens of i} p_e
    MTP              coefficient · mean of the cross entropy of the token after the next one, over
                     the step's tokens whose next one is trained
    expert bias      bias_e + rate · sign(mean load − load_e), loads counted over the step
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from tests.parity.architecture import Architecture
from tests.parity.reference_model import Forward, Routing
from tests.parity.rollouts import Example

type Partition = Sequence[Sequence[int]]
"""Which examples of a step are in which micro-batch, over all ranks."""


@dataclass(frozen=True)
class Auxiliary:
    """Coefficients; 0 is off."""

    z_loss: float = 0.0
    balance: float = 0.0
    balance_over: str = "micro-batch"
    sample_balance: float = 0.0
    mtp: float = 0.0
    bias_rate: float = 0.0

    def flags(self, architecture: Architecture) -> dict[str, object]:
        """Megatron's options."""
        flags: dict[str, object] = {}
        if architecture.experts:
            kind = "seq_aux_loss" if self.sample_balance else "none"
            flags["moe-router-load-balancing-type"] = "aux_loss" if self.balance else kind
        if self.z_loss:
            flags["moe-z-loss-coeff"] = self.z_loss
        if self.balance:
            flags["moe-aux-loss-coeff"] = self.balance
            flags["moe-balance"] = self.balance_over
        if self.sample_balance:
            flags["moe-aux-loss-coeff"] = self.sample_balance
        if self.bias_rate:
            flags["moe-router-enable-expert-bias"] = True
            flags["moe-router-bias-update-rate"] = self.bias_rate
        if self.mtp:
            flags["mtp-loss-scaling-factor"] = self.mtp
        return flags

    def terms(
        self,
        forwards: Sequence[Forward],
        examples: Sequence[Example],
        partition: Partition | None,
        architecture: Architecture,
        frequencies: Sequence[Tensor],
    ) -> dict[str, tuple[float, Tensor]]:
        """Name in Megatron's log → (coefficient, value as logged: the mean over layers).

        Args:
            forwards: Of each example of the step.
            examples: The step.
            partition: Its micro-batches; default: one.
            architecture: The model.
            frequencies: f of each layer in the step before.
        """
        found = {}
        if self.z_loss:
            found["z_loss"] = self.z_loss, _z_loss(forwards)
        if self.balance:
            whole = partition or [range(len(examples))]
            if self.balance_over == "micro-batch":
                value = _balance(forwards, whole, architecture)
            else:
                same = self.balance_over == "same-step"
                of_step = frequencies_of(forwards) if same else frequencies
                value = _balance_over_step(forwards, of_step, architecture)
            found["load_balancing_loss"] = self.balance, value
        if self.sample_balance:
            samples = _balance_of_samples(forwards, architecture)
            found["seq_load_balancing_loss"] = self.sample_balance, samples
        if self.mtp:
            found["mtp_1 loss"] = self.mtp, _later_loss(forwards, examples)
        return found

    def updated(self, biases: Sequence[Tensor], forwards: Sequence[Forward]) -> list[Tensor]:
        """The expert biases of the next step."""
        if not self.bias_rate:
            return list(biases)
        loads = [
            sum((one.chosen.sum(0) for one in layer), torch.zeros(()))
            for layer in _by_layer(forwards)
        ]
        return [
            bias + self.bias_rate * torch.sign(load.float().mean() - load.float())
            for bias, load in zip(biases, loads, strict=True)
        ]


def _by_layer(forwards: Sequence[Forward]) -> list[list[Routing]]:
    return [list(layer) for layer in zip(*(f.routings for f in forwards), strict=True)]


def _z_loss(forwards: Sequence[Forward]) -> Tensor:
    layers = _by_layer(forwards)
    squares = [torch.cat([one.logits for one in layer]).logsumexp(-1) ** 2 for layer in layers]
    return torch.stack([square.mean() for square in squares]).mean()


def _balance(
    forwards: Sequence[Forward], partition: Partition, architecture: Architecture
) -> Tensor:
    layers, total = _by_layer(forwards), sum(len(f.logits) for f in forwards)
    value = torch.zeros(())
    for members in filter(len, partition):
        for layer in layers:
            chosen = torch.cat([layer[i].likeliest for i in members])
            probabilities = torch.cat([layer[i].probabilities for i in members])
            tokens, experts = chosen.shape
            loads, masses = chosen.sum(0), probabilities.sum(0)
            term = experts / (architecture.topk * tokens**2) * (loads * masses).sum()
            value = value + tokens / total * term / len(layers)
    return value


def frequencies_of(forwards: Sequence[Forward]) -> list[Tensor]:
    """Tokens of each expert over all tokens, [E] of each layer."""
    layers = [torch.cat([one.likeliest for one in layer]) for layer in _by_layer(forwards)]
    return [likeliest.double().mean(0) for likeliest in layers]


def _balance_over_step(
    forwards: Sequence[Forward], frequencies: Sequence[Tensor], architecture: Architecture
) -> Tensor:
    means = [torch.cat([o.probabilities for o in layer]).mean(0) for layer in _by_layer(forwards)]
    terms = [(f * p).sum() for f, p in zip(frequencies, means, strict=True)]
    return architecture.experts / architecture.topk * torch.stack(terms).mean()


def _balance_of_samples(forwards: Sequence[Forward], architecture: Architecture) -> Tensor:
    alone = [_balance([one], [[0]], architecture) for one in forwards]
    return torch.stack(alone).mean()


def _later_loss(forwards: Sequence[Forward], examples: Sequence[Example]) -> Tensor:
    """Position t predicts token t+2, and is trained where token t+2 is."""
    total, count = torch.zeros(()), 0
    for found, example in zip(forwards, examples, strict=True):
        assert found.later_logits is not None
        prompt = len(example.tokens) - len(example.mask)
        trained = [prompt + j for j, m in enumerate(example.mask) if m and prompt + j >= 2]
        if trained:
            log_probs = found.later_logits[[t - 2 for t in trained]].log_softmax(-1)
            targets = torch.tensor([example.tokens[t] for t in trained])
            total = total - log_probs.gather(-1, targets[:, None]).sum()
        count += len(trained)
    return total / count
