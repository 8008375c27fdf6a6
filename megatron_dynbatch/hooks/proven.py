"""Trainings in which tests/parity/test_pairs.py finds what every sample alone gives: their traits.

Two traits are proved together if a training has both. The tests build each training from its line,
and see that it has these traits and no others. Written by `python -m tests.parity.pairs`.
"""

from __future__ import annotations

_TRAININGS = """
1 adam aux-loss balance-same-step context-parallel empty-skipped expert-parallel experts
    fixed-width group-mean learned overlap-grad-reduce per-token-loss recompute self-attention
    sinks sliding-window z-loss

2 aux-loss balance-previous-step empty-skipped expert-bias experts fixed-width learned
    overlap-grad-reduce per-token-loss sample-mean self-attention seq-aux-loss sequence-parallel
    sgd sinks tensor-parallel z-loss

3 aux-loss balance-previous-step context-parallel empty-skipped expert-parallel experts mtp
    recompute rollout-mean rope self-attention seq-aux-loss sgd sinks sliding-window
    variable-width

4 adam aux-loss balance-same-step constant-mean empty-skipped experts fixed-width mtp
    overlap-grad-reduce pipeline rope self-attention seq-aux-loss sinks sliding-window

5 adam aux-loss balance-same-step data-parallel empty-skipped expert-parallel experts fixed-width
    latent-attention learned overlap-grad-reduce sinks sliding-window token-mean

6 data-parallel empty-skipped group-mean latent-attention mtp overlap-grad-reduce recompute rope
    sgd sinks sliding-window variable-width

7 aux-loss data-parallel experts fixed-width latent-attention mtp none sgd sinks token-mean z-loss

8 aux-loss balance-same-step empty-skipped experts none per-token-loss pipeline recompute
    rollout-mean self-attention seq-aux-loss sgd sliding-window variable-width

9 aux-loss balance-same-step data-parallel experts latent-attention overlap-grad-reduce rope
    sample-mean seq-aux-loss sgd variable-width z-loss

10 aux-loss balance-previous-step experts pipeline sample-mean self-attention seq-aux-loss sgd
    sinks sliding-window variable-width virtual-pipeline yarn z-loss

11 adam aux-loss balance-same-step data-parallel empty-skipped expert-bias expert-parallel experts
    group-mean per-token-loss recompute self-attention seq-aux-loss sequence-parallel sinks
    sliding-window tensor-parallel variable-width yarn

12 adam aux-loss balance-previous-step constant-mean empty-skipped expert-bias experts fixed-width
    mtp none off-by-one-softmax pipeline self-attention seq-aux-loss sequence-parallel
    sliding-window tensor-parallel virtual-pipeline z-loss

13 adam aux-loss balance-same-step context-parallel empty-skipped expert-bias experts
    latent-attention off-by-one-softmax overlap-grad-reduce pipeline recompute rollout-mean rope
    seq-aux-loss variable-width virtual-pipeline z-loss

14 adam aux-loss balance-previous-step data-parallel empty-skipped expert-parallel experts
    latent-attention none overlap-grad-reduce pipeline recompute sample-mean seq-aux-loss sinks
    sliding-window variable-width virtual-pipeline z-loss

15 adam aux-loss balance-same-step data-parallel expert-bias expert-parallel experts
    off-by-one-softmax overlap-grad-reduce per-token-loss rope self-attention sequence-parallel
    sliding-window tensor-parallel token-mean variable-width z-loss

16 aux-loss balance-previous-step context-parallel empty-skipped experts off-by-one-softmax
    per-token-loss pipeline recompute self-attention seq-aux-loss sgd token-mean variable-width
    virtual-pipeline yarn z-loss

17 aux-loss balance-previous-step context-parallel expert-bias experts fixed-width group-mean
    latent-attention mtp none off-by-one-softmax overlap-grad-reduce pipeline sgd sliding-window
    virtual-pipeline

18 aux-loss balance-same-step constant-mean data-parallel empty-skipped expert-bias
    expert-parallel experts fixed-width latent-attention learned overlap-grad-reduce
    per-token-loss pipeline recompute seq-aux-loss sgd sinks sliding-window virtual-pipeline

19 aux-loss balance-same-step context-parallel data-parallel expert-bias experts fixed-width mtp
    none recompute sample-mean self-attention sgd sinks sliding-window

20 adam aux-loss balance-same-step constant-mean context-parallel empty-skipped experts
    overlap-grad-reduce per-token-loss recompute self-attention sequence-parallel tensor-parallel
    variable-width yarn z-loss

21 aux-loss balance-previous-step data-parallel empty-skipped expert-bias expert-parallel experts
    fixed-width per-token-loss rollout-mean self-attention seq-aux-loss sequence-parallel sgd
    sinks tensor-parallel yarn z-loss

22 adam aux-loss balance-previous-step data-parallel expert-parallel experts learned
    off-by-one-softmax sample-mean self-attention sequence-parallel sliding-window tensor-parallel
    variable-width

23 aux-loss context-parallel data-parallel empty-skipped expert-bias experts fixed-width learned
    recompute rollout-mean self-attention sgd

24 adam aux-loss balance-same-step context-parallel distributed-optimizer empty-skipped
    expert-bias expert-parallel experts latent-attention none seq-aux-loss sinks sliding-window
    token-mean variable-width

25 adam aux-loss balance-previous-step constant-mean context-parallel distributed-optimizer
    expert-bias expert-parallel experts latent-attention mtp off-by-one-softmax
    overlap-grad-reduce overlap-param-gather rope variable-width z-loss

26 adam aux-loss balance-previous-step distributed-optimizer empty-skipped expert-bias experts
    fixed-width none off-by-one-softmax overlap-grad-reduce overlap-param-gather per-token-loss
    pipeline recompute sample-mean self-attention seq-aux-loss sequence-parallel tensor-parallel
    virtual-pipeline z-loss

27 adam data-parallel distributed-optimizer expert-parallel experts overlap-grad-reduce
    overlap-param-gather per-token-loss pipeline rollout-mean self-attention seq-aux-loss sinks
    sliding-window variable-width virtual-pipeline yarn z-loss

28 adam aux-loss context-parallel data-parallel distributed-optimizer experts group-mean learned
    overlap-grad-reduce overlap-param-gather per-token-loss self-attention seq-aux-loss sinks
    variable-width

29 adam context-parallel distributed-optimizer expert-bias experts fixed-width latent-attention
    mtp overlap-grad-reduce overlap-param-gather pipeline rope token-mean virtual-pipeline z-loss
"""
PROVEN: dict[str, frozenset[str]] = {
    name: frozenset(words)
    for name, *words in (text.split() for text in _TRAININGS.split("\n\n") if text.strip())
}
"""Row of the table of pairs of docs/parity.md → traits of that training."""
