r"""A step splitter of your own: which rollouts train together in one optimizer step.

A splitter is a function (index, options) → steps, each a list of rollout numbers. The planner
checks what it answers: every rollout once, no empty step, no cut prompt group under
--loss-reduction group. This one gives every step of a batch nearly the same number of tokens, so
that steps take the same time; taken in order, steps differ by what happens to be in them.

    python examples/custom_step_splitter.py          # both, side by side, on made-up lengths

In training, on 8 GPUs (any script; the module must be importable, here from the checkout):

    torchrun --nproc-per-node 8 -m megatron_dynbatch.run pretrain_gpt.py --dynamic-global-batch \
        --rollout-path DIR --rollouts-per-step 64 --max-tokens-per-gpu 8192 \
        --step-splitter examples.custom_step_splitter:similar_tokens \
        --attention-dropout 0 --hidden-dropout 0 …
"""

from __future__ import annotations

import numpy as np

from megatron_dynbatch.plan import ParallelLayout, PlanOptions, make_plan
from megatron_dynbatch.plan.distributions import draw_lengths, draw_rollout_ids
from megatron_dynbatch.rollouts import SampleIndex


def similar_tokens(index: SampleIndex, options: PlanOptions) -> list[list[int]]:
    """As few steps as `rollouts_per_step` allows, with nearly the same number of tokens.

    From the longest to the shortest, each rollout goes to the step with the fewest tokens that
    still has room.
    """
    tokens = np.bincount(index.rollout_indices, index.total_lengths, minlength=index.num_rollouts)
    limit = options.rollouts_per_step or index.num_rollouts
    steps: list[list[int]] = [[] for _ in range(-(-index.num_rollouts // limit))]
    sums = [0.0] * len(steps)
    for rollout in np.argsort(-tokens, kind="stable").tolist():
        step = min((s for s in range(len(steps)) if len(steps[s]) < limit), key=sums.__getitem__)
        steps[step].append(rollout)
        sums[step] += tokens[rollout]
    return steps


def main() -> None:
    """Plan the same batch with the built-in splitter and with this one."""
    lengths = draw_lengths("C", 256, seed=0)
    absent = np.full(lengths.size, -1, dtype=np.int64)
    index = SampleIndex(lengths, lengths, lengths, draw_rollout_ids(lengths.size, 0), absent)
    for splitter in ("rollouts", f"{__name__}:similar_tokens"):
        options = PlanOptions(
            max_tokens_per_gpu=65536, rollouts_per_step=32, step_splitter=splitter
        )
        plan = make_plan(index, ParallelLayout(dp=8), options)
        tokens = [int(plan.index.total_lengths[step.samples].sum()) for step in plan.steps]
        counts = [step.num_microbatches for step in plan.steps]
        print(f"{splitter.rpartition(':')[2]}: tokens {tokens}, micro-batches per rank {counts}")


if __name__ == "__main__":
    main()
