"""The golden fixture: four samples, three rollouts, and the values every path must reproduce."""

from dataclasses import dataclass

PROMPTS = [3, 5, 2, 1]
MASKS = [[1, 1, 0, 1], [1], [0, 0], [1, 1]]
VALUES = [[1.0, 2, 100, 3], [10.0], [7.0, 8], [4.0, 6]]
ROLLOUTS = [0, 0, 1, 2]
GROUPS = [0, 0, 0, 1]
RESPONSES = [len(mask) for mask in MASKS]
TOTALS = [prompt + response for prompt, response in zip(PROMPTS, RESPONSES, strict=True)]


@dataclass(frozen=True)
class Reduction:
    """Denominators of the four samples, B, and the step's Σ w·x."""

    denoms: list[int]
    loss_denominator: int
    total: float

    @property
    def loss(self) -> float:
        return self.total / self.loss_denominator


REDUCTIONS = {
    "rollout": Reduction([4, 4, 0, 2], 3, 9.0),
    "sample": Reduction([3, 1, 0, 2], 4, 17.0),
    "token": Reduction([1, 1, 1, 1], 6, 26.0),
    # Group 0 holds A, B and C (4 trained tokens), group 1 holds D: 16/4 + 10/2 over 2 groups.
    "group": Reduction([4, 4, 4, 2], 2, 9.0),
    # Dr. GRPO with the constant 8: 26/8 over 3 rollouts.
    "constant": Reduction([8, 8, 8, 8], 3, 3.25),
}

# Σ w·x of each context-parallel rank, all four samples in one micro-batch.
RANK_SUMS = {
    ("rollout", 1): [9.0],
    ("rollout", 2): [2.0, 7.0],
    ("rollout", 4): [2.0, 3.0, 1.0, 3.0],
    ("sample", 4): [2.0, 3.0, 4 / 3, 32 / 3],
}

# Σ w·x under `rollout` of the micro-batches {A, D} and {B, C}: [rank][micro-batch].
SPLIT = [[0, 3], [1, 2]]
SPLIT_SUMS = {1: [[6.5, 2.5]], 2: [[2.0, 0.0], [4.5, 2.5]]}
