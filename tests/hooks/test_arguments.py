"""Flags in Megatron's own parser, and the errors of a wrong command line, before training."""

from __future__ import annotations

import contextlib
import io
import sys
from pathlib import Path

import pytest

from megatron_dynbatch.rollouts import RolloutDirectory
from tests.pool import run_ranks
from tests.reliability.catalogue import shown

MODEL = (
    "--num-layers 2 --hidden-size 32 --num-attention-heads 4 --max-position-embeddings 64 "
    "--tokenizer-type NullTokenizer --vocab-size 127 --lr 1e-2 --eval-iters 0 "
    "--transformer-impl local --attention-dropout 0 --hidden-dropout 0"
).split()


def parse(argv: list[str]) -> tuple[dict[str, object], str]:
    """Validated arguments as a dict, or the message of the error."""
    import megatron_dynbatch
    from megatron_dynbatch.cpu import reset_megatron

    megatron_dynbatch.install()
    from megatron.training.arguments import parse_and_validate_args

    reset_megatron()
    sys.argv = ["script.py", *MODEL, *argv]
    errors = io.StringIO()
    try:
        with contextlib.redirect_stderr(errors):
            return vars(parse_and_validate_args()), ""
    except (SystemExit, ValueError, AssertionError) as error:
        return {}, errors.getvalue() + str(error)


def parse_all(lines: list[list[str]]) -> list[tuple[dict[str, object], str]]:
    """Several command lines in one process; only plain values come back."""
    plain = (int, float, str, bool, type(None))
    results = [parse(line) for line in lines]
    return [({k: v for k, v in a.items() if isinstance(v, plain)}, e) for a, e in results]


def flags(directory: Path, *more: str, without: str = "") -> list[str]:
    given = {
        "--dynamic-global-batch": [],
        "--rollout-path": [str(directory)],
        "--rollouts-per-step": ["6"],
        "--max-tokens-per-gpu": ["64"],
        "--train-iters": ["9"],
    }
    listed = [word for name, value in given.items() if name != without for word in (name, *value)]
    return listed + list(more)


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    RolloutDirectory(tmp_path / "rollouts")
    return tmp_path / "rollouts"


def test_what_the_flags_imply(directory: Path) -> None:
    lines = [
        flags(directory),
        flags(directory, "--rollouts-per-step", "batch", "--train-samples", "45",
              without="--train-iters"),
        flags(directory, "--micro-batch-width", "variable", "--seq-length", "48"),
        ["--train-iters", "9", "--seq-length", "64", "--micro-batch-size", "2"],
    ]
    ((fixed, batch, variable, off),) = run_ranks(1, parse_all, lines, process_group=False)
    assert all(not error for _, error in (fixed, batch, variable, off))
    assert fixed[0]["global_batch_size"] == 6
    assert fixed[0]["seq_length"] == 64
    assert fixed[0]["sft"] is True and fixed[0]["micro_batch_size"] == 1
    assert batch[0]["train_samples"] == 45
    assert variable[0]["variable_seq_lengths"] is True and variable[0]["sft"] is False
    assert off[0]["global_batch_size"] == 2 and off[0]["dataloader_type"] == "single"


def test_wrong_command_lines_are_told_before_training(directory: Path, tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "file.txt").write_text("not rollouts")
    cases = [
        (flags(directory, without="--rollout-path"), "needs --rollout-path"),
        (flags(directory, without="--rollouts-per-step"), "needs --rollouts-per-step"),
        (flags(directory, without="--max-tokens-per-gpu"), "needs --max-tokens-per-gpu"),
        (flags(directory, "--rollouts-per-step", "0"), "expected a positive integer or 'batch'"),
        (flags(directory, "--rollouts-per-step", "batch"), "goes with --train-samples"),
        (flags(directory, "--global-batch-size", "8"), "--global-batch-size 8 does not fit"),
        (flags(directory, "--micro-batch-size", "2"), "--micro-batch-size 2"),
        (flags(directory, "--seq-length", "128"), "--seq-length 128 must be"),
        (flags(directory, "--loss-reduction", "mean"), "invalid choice: 'mean'"),
        (flags(directory, "--loss-reduction", "constant"), "--loss-constant goes with"),
        (flags(directory, "--oversize", "alone"), "needs micro-batches of variable width"),
        (flags(directory, "--rollout-path", str(tmp_path / "other")), "other"),
        (flags(directory, "--mtp-num-layers", "1", "--position-embedding-type", "rope",
               "--calculate-per-token-loss"), "number of tokens that may be 0"),
        (flags(directory, "--mtp-num-layers", "2", "--position-embedding-type", "rope"),
         "--mtp-num-layers above 1"),
        (flags(directory, "--attention-dropout", "0.1"),
         "write --attention-dropout 0 --hidden-dropout 0, or admit it with --admit-unproven "
         "dropout"),
        (flags(directory, "--admit-unproven", "dropout", "speed"),
         "--admit-unproven speed: no such trait; there are dropout"),
        (flags(directory, "--num-experts", "2", "--moe-input-jitter-eps", "0.1",
               "--moe-token-dispatcher-type", "alltoall"), "--moe-input-jitter-eps"),
        (flags(directory, "--num-experts", "2", "--moe-balance", "previous-step",
               "--moe-router-load-balancing-type", "seq_aux_loss",
               "--moe-token-dispatcher-type", "alltoall"),
         "--moe-balance previous-step or same-step: it changes aux_loss only"),
        (flags(directory, "--keep-batches", "-1"), "--keep-batches -1: give a number of batches"),
        (flags(directory, "--num-experts", "2", "--moe-expert-capacity-factor", "1",
               "--moe-token-dispatcher-type", "alltoall"), "--moe-expert-capacity-factor"),
    ]
    ((*results,),) = run_ranks(1, parse_all, [line for line, _ in cases], process_group=False)
    for (line, expected), (args, error) in zip(cases, results, strict=True):
        assert not args, f"accepted: {line}"
        assert expected in error, f"{line}: {error[-300:]}"
    told = "\n".join(error for _, error in results)
    shown("--dynamic-global-batch cannot be used like this", told)
    shown("--keep-batches", told)
    shown("--admit-unproven", told)


def _help() -> str:
    parse([])
    from megatron.training.arguments import parse_args

    sys.argv = ["script.py", "--help"]
    text = io.StringIO()
    with contextlib.redirect_stdout(text), contextlib.suppress(SystemExit):
        parse_args()
    return text.getvalue()


def test_the_flags_stand_in_megatrons_own_help() -> None:
    (text,) = run_ranks(1, _help, process_group=False)
    for flag in (
        "--dynamic-global-batch", "--rollout-path", "--rollouts-per-step", "--max-tokens-per-gpu",
        "--loss-reduction", "--loss-constant", "--leftover", "--empty-rollouts", "--oversize",
        "--batch-timeout",
    ):
        assert flag in text
