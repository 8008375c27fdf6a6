"""Whole Megatron trainings inside a job of `tests.pool`, with tiny models.

    from tests.cpu.training import train_ranks

    trainings = train_ranks(2, ["--pipeline-model-parallel-size", "2"])
    losses = [row["lm loss"] for row in trainings[-1].rows]   # the last stage has them

`train_ranks` runs a stock-shaped script (examples/pretrain_gpt_sft.py unless told otherwise) with
the real `megatron.training.pretrain`, from weights that depend on parameter names alone and are
therefore the same under every layout.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.harness import launch, row_of, watching
from tests.pool import ROOT, run_ranks

SCRIPT = ROOT / "examples" / "pretrain_gpt_sft.py"

#: A tiny GPT; a later occurrence of the same flag wins, so callers only add what differs.
TINY = (
    "--num-layers 2 --hidden-size 32 --num-attention-heads 4 --ffn-hidden-size 64 "
    "--normalization RMSNorm --position-embedding-type rope --swiglu --disable-bias-linear "
    "--untie-embeddings-and-output-weights --attention-dropout 0 --hidden-dropout 0 "
    "--seq-length 64 --max-position-embeddings 64 --micro-batch-size 1 --global-batch-size 4 "
    "--tokenizer-type NullTokenizer --vocab-size 127 --make-vocab-size-divisible-by 16 "
    "--sft --no-create-attention-mask-in-dataloader --dataloader-type single "
    "--train-iters 3 --lr 1e-2 --lr-decay-style constant --weight-decay 0.01 "
    "--log-interval 1 --eval-iters 0 --eval-interval 1000 --timing-log-level 0"
).split()


@dataclass
class Training:
    """What a training left behind on one rank.

    Attributes:
        rows: One dict per iteration: iteration, learning_rate, grad_norm, consumed, and the losses
            that this rank knows (the last pipeline stage only), all as Megatron logs them.
        collected: What the caller's `collect` returned.
    """

    rows: list[dict[str, float]] = field(default_factory=list)
    collected: Any = None

    def column(self, name: str) -> list[float]:
        """One value of every iteration."""
        return [row[name] for row in self.rows]


def train_ranks(
    size: int, argv: Sequence[str] = (), timeout: float = 120.0, **options: Any
) -> list[Training]:
    """Run `train` on every rank of a new world.

    Args:
        size: Number of ranks.
        argv: Flags after those of TINY.
        timeout: Seconds until the job counts as hanging.
        **options: Further arguments of `train`.

    Returns:
        The training of each rank.
    """
    return run_ranks(size, train, argv, timeout=timeout, **options)


def train(
    argv: Sequence[str] = (),
    script: Path | str = SCRIPT,
    install_hooks: bool = False,
    weights_seed: int | None = 1234,
    before: Callable[[list[Any], Any], Any] | None = None,
    collect: Callable[[list[Any], Any], Any] | None = None,
) -> Training:
    """Run one training in this process; a rank's job may call it several times.

    Args:
        argv: Flags after those of TINY.
        script: Pretrain script, run as `__main__` the way the launcher runs it.
        install_hooks: Whether the plugin's hooks are installed first.
        weights_seed: Overwrite the initial weights from this seed and the parameters' names; None
            leaves Megatron's own, which differ between layouts.
        before: Called with (model chunks, optimizer) before the first iteration.
        collect: Called with (model chunks, optimizer) after the last iteration.

    Returns:
        The iterations' numbers and what `collect` returned.
    """
    from megatron_dynbatch.cpu import reset_megatron
    from tests.cpu.weights import overwrite_weights

    if install_hooks:
        from megatron_dynbatch import hooks

        hooks.install()
    reset_megatron()
    result = Training()

    def begin(model: list[Any], optimizer: Any) -> None:
        if weights_seed is not None:
            overwrite_weights(model, weights_seed)
            optimizer.reload_model_params()
        if before is not None:
            before(model, optimizer)

    def end(model: list[Any], optimizer: Any) -> None:
        result.collected = collect(model, optimizer) if collect is not None else None

    with watching(before=begin, after=end, logged=lambda given: result.rows.append(row_of(given))):
        launch(script, (*TINY, *argv))
    return result
