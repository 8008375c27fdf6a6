"""Nothing that people train is refused: model families, the demo, every command of the pages."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

from examples.demo.runs import MODEL
from tests.parity.architecture import Architecture
from tests.parity.job import Cell
from tests.parity.models import FAMILIES, FEATURES
from tests.parity.rollouts import batch_flags
from tests.pool import ROOT, run_ranks
from tests.reliability.catalogue import shown

PAGES = [ROOT / "README.md", *(ROOT / "docs").glob("*.md"), *(ROOT / "examples").glob("*.*")]
COMMAND = re.compile(r"^[ #]*(?:srun )?torchrun (?:.*\\\n)*.*$", re.MULTILINE)
# What a family trains with, besides its architecture.
WAYS = (
    "", "--loss-reduction token --calculate-per-token-loss --micro-batch-width fixed",
    "--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather "
    "--loss-reduction group --empty-rollouts skip --micro-batch-width variable",
    "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1 "
    "--tensor-model-parallel-size 2 --sequence-parallel --context-parallel-size 2 "
    "--pipeline-model-parallel-size 2 --use-distributed-optimizer --overlap-grad-reduce",
    "--pipeline-model-parallel-size 2 --num-virtual-stages-per-pipeline-rank 2 "
    "--context-parallel-size 2",
)  # fmt: skip


def commands(page: Path) -> list[list[str]]:
    """The arguments of each command of a page that trains with the plugin."""
    found = []
    for command in COMMAND.findall(page.read_text(encoding="utf-8")):
        words = shlex.split(re.sub(r"\\\n[ #]*", " ", command).lstrip(" #"), comments=True)
        if "--dynamic-global-batch" in words:
            found.append([w for w in words[words.index("--dynamic-global-batch") :] if w != "…"])
    return found


def families() -> dict[str, list[str]]:
    """Name → arguments of each model of the suite, in each way."""
    found = {}
    for name, model in (FAMILIES | FEATURES).items():
        for number, way in enumerate(WAYS):
            if "calculate-per-token-loss" in way and "mtp-num-layers" in model.flags:
                continue  # refused for a reason of its own
            if "overlap-param-gather" in way and model.flags.get("optimizer") == "sgd":
                continue  # Megatron has it for Adam only
            if "context-parallel" in way and model.flags.get("optimizer") == "sgd":
                way = way.replace("--use-distributed-optimizer", "")
            flags = {**batch_flags(Path("rollouts")), **model.flags}
            argv = Cell(1, flags, architecture=Architecture()).argv()
            experts = ["--expert-model-parallel-size", "2"] * ("num-experts" in model.flags)
            # The CPU's layers are refused with latent attention under tensor parallelism.
            argv += ["--transformer-impl", "transformer_engine", *experts, *way.split()]
            found[f"{name}, {number}"] = argv
    return found


def refusals(lines: dict[str, list[str]]) -> dict[str, list[str]]:
    """What is refused of each command line, read by Megatron's own parser."""
    from megatron_dynbatch import install
    from megatron_dynbatch.cli.doctor import _parse
    from megatron_dynbatch.hooks.admission import refused

    install()
    return {name: refused(_parse(argv)) for name, argv in lines.items()}


def refusals_of(lines: dict[str, list[str]]) -> dict[str, list[str]]:
    (found,) = run_ranks(1, refusals, lines, process_group=False)
    return {name: sentences for name, sentences in found.items() if sentences}


def test_no_family_is_refused() -> None:
    lines = families()
    assert len(lines) > 100
    assert refusals_of(lines) == {}


def test_no_command_of_a_page_is_refused() -> None:
    lines = {
        f"{page.name}, {number}": words
        for page in PAGES
        for number, words in enumerate(commands(page))
    }
    assert {"README.md, 0", "pretrain_gpt_dynamic.sh, 0", "sft_varlen.py, 0"} <= lines.keys()
    lines["the demo"] = [
        "--dynamic-global-batch", "--rollout-path", "rollouts", "--rollouts-per-step", "4",
        "--max-tokens-per-gpu", "64", "--train-iters", "4", "--lr-decay-iters", "4", *MODEL,
    ]  # fmt: skip
    assert refusals_of(lines) == {}


def test_a_pair_that_is_refused_says_which_and_what_to_write() -> None:
    flags = {
        **batch_flags(Path("rollouts")), "optimizer": "sgd", "use-distributed-optimizer": True,
    }  # fmt: skip
    argv = Cell(1, flags).argv()
    told = refusals_of({"refused": argv})["refused"]
    admitted = [*argv, "--admit-unproven", "sgd+distributed-optimizer"]
    assert refusals_of({"admitted": admitted}) == {}
    assert told == [
        "--use-distributed-optimizer with --optimizer sgd: no parity test has both; leave one of "
        "them out, or admit it with --admit-unproven distributed-optimizer+sgd"
    ]
    shown("… with …: no parity test has both", told[0])
