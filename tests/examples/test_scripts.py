"""The three ways in train the same rollouts to the same numbers (real Megatron, CPU)."""

from __future__ import annotations

import json
import runpy
from pathlib import Path

import pytest

from megatron_dynbatch.report.step_report import read_step_reports
from tests.cpu.training import train_ranks
from tests.parity.rollouts import CAPACITY, STEP_SIZES, make_steps, write_batches
from tests.pool import ROOT, run_ranks

# Batches hold at most this many rollouts, so each batch is one step.
LARGEST = max(STEP_SIZES)
NUM_STEPS = len(STEP_SIZES)
HORIZON = LARGEST * NUM_STEPS
WEIGHTS_SEED = 1234

Numbers = list[tuple[int, float, float, float]]
"""(G, loss, grad norm, LR after the step) of each step."""


@pytest.fixture(scope="module")
def rollouts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The parity suite's rollouts, one batch per step."""
    path = tmp_path_factory.mktemp("examples") / "rollouts"
    write_batches(path, make_steps())
    return path


def with_pretrain(script: str, rollouts: Path, *more: str) -> Numbers:
    """Train with Megatron's pretrain on two ranks; numbers as Megatron logs them."""
    argv = [
        "--dynamic-global-batch", "--rollout-path", str(rollouts),
        "--rollouts-per-step", str(LARGEST), "--global-batch-size", str(LARGEST),
        "--max-tokens-per-gpu", str(CAPACITY),
        "--train-iters", str(NUM_STEPS), "--lr-decay-iters", str(NUM_STEPS),
        "--lr-decay-style", "linear", "--lr", "1e-2", "--min-lr", "0", "--weight-decay", "0",
        *more,
    ]  # fmt: skip
    path = ROOT / "examples" / script
    trainings = train_ranks(2, argv, script=path, install_hooks=True, weights_seed=WEIGHTS_SEED)
    rows = trainings[-1].rows
    consumed = [0, *(int(row["consumed"]) for row in rows)]
    return [
        (after - before, row["lm loss"], row["grad_norm"], row["learning_rate"])
        for before, after, row in zip(consumed, consumed[1:], rows, strict=False)
    ]


def with_own_loop(rollouts: Path, pipeline_size: int) -> Numbers:
    """Train with examples/own_loop_mcore.py on two ranks."""
    argv = [
        "--rollout-path", str(rollouts), "--max-tokens-per-gpu", str(CAPACITY),
        "--pipeline-size", str(pipeline_size), "--vocab-size", "128", "--hidden-size", "32",
        "--lr", "1e-2", "--lr-decay-rollouts", str(HORIZON),
    ]  # fmt: skip
    return run_ranks(2, own_loop_rank, argv)[-1]


def own_loop_rank(argv: list[str]) -> Numbers:
    """The own loop on this rank, from the weights that the other scripts start from."""
    from tests.cpu.weights import overwrite_weights

    loop = runpy.run_path(str(ROOT / "examples" / "own_loop_mcore.py"))

    def prepare(model: object, optimizer: object) -> None:
        overwrite_weights([model], WEIGHTS_SEED)

    return loop["train"](loop["parse_arguments"](argv), prepare)


def assert_same(found: Numbers, expected: Numbers) -> None:
    """Loss, grad norm and LR of every step within 1e-5, and the sizes of the steps."""
    assert [step[0] for step in found] == list(STEP_SIZES)
    for ours, theirs in zip(found, expected, strict=True):
        assert ours == pytest.approx(theirs, rel=1e-5)


@pytest.mark.slow
def test_three_ways_in_give_the_same_numbers(rollouts: Path) -> None:
    """Whatever the two ranks share: the data, or the layers of the model."""
    pipeline = ("--pipeline-model-parallel-size", "2")
    stock = with_pretrain("pretrain_gpt_sft.py", rollouts)
    assert_same(stock, stock)
    variable = ("--micro-batch-width", "variable")
    assert_same(with_pretrain("sft_varlen.py", rollouts, *variable, *pipeline), stock)
    for pipeline_size in (1, 2):
        assert_same(with_own_loop(rollouts, pipeline_size), stock)


def test_chats_become_steps_of_different_sizes(tmp_path: Path) -> None:
    """A step holds at most 24 tokens, here UTF-8 bytes, of whole conversations."""
    turns = [(3, 2, 1, 1), (2, 1), (1, 2), (8, 3), (1, 0)]
    with (tmp_path / "chats.jsonl").open("w") as file:
        for lengths in turns:
            messages = [
                {"role": ("user", "assistant")[k % 2], "content": " ".join(["7"] * n)}
                for k, n in enumerate(lengths)
                if n
            ]
            messages += [{"role": "assistant", "content": "9"}] * (lengths[-1] == 0)
            print(json.dumps({"messages": messages}), file=file)
    argv = [
        "--dynamic-global-batch", "--rollout-path", str(tmp_path / "rollouts"),
        "--chat-jsonl", str(tmp_path / "chats.jsonl"), "--message-format", "{content}",
        "--rollouts-per-step", "100", "--global-batch-size", "100", "--max-tokens-per-gpu", "64",
        "--step-splitter", "tokens", "--tokens-per-step", "24", "--vocab-size", "257",
        "--micro-batch-width", "variable", "--train-iters", "10",
        "--step-report", str(tmp_path / "steps.jsonl"),
    ]  # fmt: skip
    train_ranks(1, argv, script=ROOT / "examples" / "sft_varlen.py", install_hooks=True)
    reports = read_step_reports(tmp_path / "steps.jsonl")
    # With an end-of-document token after each answer: 12, 5, 5 | 21, 3 tokens.
    assert [(r.step_global_batch_size, r.num_tokens) for r in reports] == [(3, 22), (2, 24)]
    assert [r.num_trained_tokens for r in reports] == [4 + 2 + 2 + 4, 6 + 2]
