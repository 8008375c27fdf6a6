"""An independent single-process training loop to compare with.

Plain torch: one sample at a time through a GPT written out beside it, no packing, no padding, no
micro-batches, no Megatron, and no code of the package under test. The loss of a step is the
formula of semantics.md, word by word; clipping, AdamW and the schedule follow Megatron's
documentation.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from tests.parity.architecture import Architecture
from tests.parity.reference_aux import Auxiliary, Partition, frequencies_of
from tests.parity.reference_model import Forward, forward
from tests.parity.rollouts import Example

LOSS_NAMES = {"sft": "lm loss", "clip": "loss"}
"""What the loss is called in reports."""


@dataclass(frozen=True)
class Recipe:
    """Everything about the training that is neither data nor architecture.

    Adam's usual epsilon, 1e-8, turns the rounding of vanishing float32 gradients into whole steps;
    float64 trainings use it. Horizons are in rollouts. `dtype` is that of weights and arithmetic;
    `objective` is "sft" or "clip", see `token_values`.
    """

    objective: str = "sft"
    reduction: str = "rollout"
    loss_constant: float = 1.0
    empty_rollouts: str = "count"
    learning_rate: float = 2e-3
    min_learning_rate: float = 0.0
    warmup: int = 0
    decay: int = 45
    weight_decay: float = 0.1
    end_weight_decay: float | None = None
    clip_grad: float = 1.0
    betas: tuple[float, float] = (0.9, 0.999)
    epsilon: float = 1e-4
    dtype: torch.dtype = torch.float64
    auxiliary: Auxiliary = Auxiliary()

    def flags(self) -> dict[str, object]:
        """Megatron's options for this recipe."""
        flags: dict[str, object] = {
            "lr": self.learning_rate,
            "min-lr": self.min_learning_rate,
            "lr-decay-style": "linear",
            "lr-decay-samples": self.decay,
            "weight-decay": self.weight_decay,
            "clip-grad": self.clip_grad,
            "adam-beta1": self.betas[0],
            "adam-beta2": self.betas[1],
            "adam-eps": self.epsilon,
        }
        if self.warmup:
            flags["lr-warmup-samples"] = self.warmup
        if self.end_weight_decay is not None:
            flags["start-weight-decay"] = self.weight_decay
            flags["end-weight-decay"] = self.end_weight_decay
            flags["weight-decay-incr-style"] = "linear"
        return flags

    def learning_rate_at(self, consumed: int) -> float:
        """Linear warm-up from 0, then linear decay; `consumed` rollouts were trained."""
        if self.warmup and consumed <= self.warmup:
            return self.learning_rate * consumed / self.warmup
        done = min(1.0, (consumed - self.warmup) / (self.decay - self.warmup))
        return self.min_learning_rate + (1 - done) * (self.learning_rate - self.min_learning_rate)

    def weight_decay_at(self, consumed: int, total: int) -> float:
        """Constant, or linear from start to end over `total` rollouts."""
        if self.end_weight_decay is None:
            return self.weight_decay
        done = min(1.0, consumed / total)
        return self.weight_decay + done * (self.end_weight_decay - self.weight_decay)


@dataclass
class ReferenceStep:
    """What one step did.

    Attributes:
        metrics: Name → weighted mean as reported, the loss L of semantics.md among them.
        grad_norm: L2 norm of all gradients, before clipping.
        learning_rate: For the next step.
        weight_decay: For the next step.
        consumed: Rollouts trained so far.
        gradients: Global name → gradient before clipping.
        parameters: Global name → value after the update.
        logged: Auxiliary losses by their name in Megatron's log.
        biases: Expert bias of each layer after the update.
    """

    metrics: dict[str, float]
    grad_norm: float
    learning_rate: float
    weight_decay: float
    consumed: int
    gradients: dict[str, Tensor] = field(repr=False)
    parameters: dict[str, Tensor] = field(repr=False)
    logged: dict[str, float] = field(default_factory=dict)
    biases: list[Tensor] = field(default_factory=list)


def train(
    steps: Sequence[Sequence[Example]],
    recipe: Recipe,
    architecture: Architecture | None = None,
    total: int | None = None,
    partitions: Sequence[Partition] | None = None,
) -> list[ReferenceStep]:
    """Train from the architecture's initial parameters.

    Args:
        steps: The examples of each step, all of its rollouts whole.
        recipe: How.
        architecture: The model.
        total: Rollouts of the whole run, for the weight-decay schedule.
        partitions: Micro-batches of each step, which the load-balancing loss depends on; default:
            one.
    """
    architecture = architecture or Architecture()
    total = total or sum(len({e.rollout for e in step}) for step in steps)
    values = architecture.initial_parameters()
    parameters = {n: v.to(recipe.dtype).requires_grad_() for n, v in values.items()}
    optimizer = torch.optim.AdamW(_groups(parameters), betas=recipe.betas, eps=recipe.epsilon)
    consumed, records = 0, []
    biases = [torch.zeros(architecture.experts) for _ in range(architecture.num_layers)]
    even = torch.full((architecture.experts,), architecture.topk / max(architecture.experts, 1))
    frequencies = [even.double() for _ in range(architecture.num_layers)]
    for number, step in enumerate(steps):
        for group in optimizer.param_groups:
            group["lr"] = recipe.learning_rate_at(consumed)
            group["weight_decay"] = group["decays"] * recipe.weight_decay_at(consumed, total)
        optimizer.zero_grad()
        forwards = [forward(parameters, e.tokens, architecture, biases) for e in step]
        means = step_means(forwards, step, recipe)
        partition = partitions[number] if partitions else None
        terms = recipe.auxiliary.terms(forwards, step, partition, architecture, frequencies)
        if architecture.experts:
            frequencies = frequencies_of(forwards)
        # The log shows means over layers; the loss adds layers up.
        layers = {"mtp_1 loss": 1}
        extra = [c * v * layers.get(n, architecture.num_layers) for n, (c, v) in terms.items()]
        sum(extra, means[LOSS_NAMES[recipe.objective]]).backward()
        biases = recipe.auxiliary.updated(biases, forwards)
        gradients = {n: _gradient(p).clone() for n, p in parameters.items()}
        norm = math.sqrt(sum(float((g.double() ** 2).sum()) for g in gradients.values()))
        _clip(parameters, norm, recipe.clip_grad)
        optimizer.step()
        consumed += len({example.rollout for example in step})
        records.append(
            ReferenceStep(
                metrics={name: mean.item() for name, mean in means.items()},
                grad_norm=norm,
                learning_rate=recipe.learning_rate_at(consumed),
                weight_decay=recipe.weight_decay_at(consumed, total),
                consumed=consumed,
                gradients=gradients,
                parameters={n: p.detach().clone() for n, p in parameters.items()},
                logged={name: value.item() for name, (_, value) in terms.items()},
                biases=biases,
            )
        )
    return records


def step_means(
    forwards: Sequence[Forward], examples: Sequence[Example], recipe: Recipe
) -> dict[str, Tensor]:
    """(1/B) Σ_i (1/d_i) Σ_t m_it x_it (semantics.md) for each x of `token_values`."""
    denominators, count = denominators_of(examples, recipe)
    means: dict[str, Tensor] = defaultdict(lambda: torch.zeros((), dtype=recipe.dtype))
    for found, example, denominator in zip(forwards, examples, denominators, strict=True):
        trained = torch.tensor(example.mask, dtype=torch.bool)
        if not trained.any():
            continue
        log_probs = response_log_probs(found.logits, example)
        for name, values in token_values(log_probs, example, recipe.objective).items():
            means[name] = means[name] + values[trained].sum() / denominator / count
    return dict(means)


def token_values(log_probs: Tensor, example: Example, objective: str) -> dict[str, Tensor]:
    """Every value that is averaged, one per response token.

    Args:
        log_probs: [R, vocab].
        example: The tokens, and what the policy loss needs.
        objective: "sft": the cross entropy. "clip": PPO's clipped surrogate with bounds 0.8 and
            1.2, at most 3·|A| where the advantage A is negative, plus 0.1 times the k3 estimate of
            the KL to the reference policy, minus 0.01 times the entropy.
    """
    response = torch.tensor(example.tokens[len(example.tokens) - len(example.mask) :])
    chosen = log_probs[torch.arange(len(response)), response]
    if objective == "sft":
        return {"lm loss": -chosen}
    old = torch.tensor(example.log_probs, dtype=chosen.dtype)
    to_ref = torch.tensor(example.ref_log_probs, dtype=chosen.dtype) - chosen
    advantage = torch.tensor(example.advantages, dtype=chosen.dtype)
    ratio = torch.exp(chosen - old)
    plain, clipped = -advantage * ratio, -advantage * torch.clip(ratio, 0.8, 1.2)
    surrogate = torch.where(plain >= clipped, plain, clipped)
    over = (surrogate > -3 * advantage) & (advantage < 0)
    policy = torch.where(over, -3 * advantage, surrogate)
    divergence = torch.exp(to_ref) - to_ref - 1
    entropy = -(log_probs.exp() * log_probs).sum(-1)
    return {
        "loss": policy + 0.1 * divergence - 0.01 * entropy,
        "pg_loss": policy,
        "clip_fraction": (clipped > plain).to(chosen.dtype),
        "dual_clip_fraction": over.to(chosen.dtype),
        "approx_kl": ratio - 1 - (chosen - old),
        "ratio": ratio,
        "ratio_clamped": torch.zeros_like(chosen),
        "kl": divergence,
        "entropy": entropy,
    }


def denominators_of(examples: Sequence[Example], recipe: Recipe) -> tuple[list[float], float]:
    """d of each example, and B."""
    own = [sum(example.mask) for example in examples]
    if recipe.reduction == "token":
        return [1.0] * len(examples), float(sum(own))
    keys: list[Hashable]
    if recipe.reduction == "sample":
        keys = list(range(len(examples)))
    elif recipe.reduction == "group":
        keys = [example.group for example in examples]
    else:
        keys = [example.rollout for example in examples]
    sums: dict[Hashable, int] = defaultdict(int)
    for key, trained in zip(keys, own, strict=True):
        sums[key] += trained
    counted = [key for key in sums if sums[key] or recipe.empty_rollouts == "count"]
    if recipe.reduction == "constant":
        return [recipe.loss_constant] * len(examples), float(len(counted))
    return [float(sums[key]) for key in keys], float(len(counted))


def response_log_probs(logits: Tensor, example: Example) -> Tensor:
    """Log-probabilities from which every response token was drawn, [R, vocab].

    Uniform ones stand for those of a first token without a prompt, which is never trained.
    """
    # The prediction of token t is made at position t - 1.
    predicting = torch.cat([torch.zeros_like(logits[:1]), logits[:-1]])
    return predicting[len(example.tokens) - len(example.mask) :].log_softmax(-1)


def _groups(parameters: dict[str, Tensor]) -> list[dict[str, object]]:
    """Weight decay on matrices only, as Megatron does it."""
    matrices = [p for p in parameters.values() if p.dim() > 1]
    vectors = [p for p in parameters.values() if p.dim() == 1]
    return [{"params": matrices, "decays": 1.0}, {"params": vectors, "decays": 0.0}]


def _gradient(parameter: Tensor) -> Tensor:
    return torch.zeros_like(parameter) if parameter.grad is None else parameter.grad


def _clip(parameters: dict[str, Tensor], norm: float, limit: float) -> None:
    if not limit:
        return
    factor = limit / (norm + 1e-6)
    if factor < 1.0:
        for parameter in parameters.values():
            if parameter.grad is not None:
                parameter.grad.mul_(factor)
