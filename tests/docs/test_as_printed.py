"""Commands of the pages and the examples, run as they are printed.

What runs on a CPU runs from the installed wheel, in a folder outside the checkout, with the
placeholders filled from `PLACEHOLDERS`. Commands of real size run with the numbers of `SMALL`, in
processes of the pool. The rest (`NOT_RUN`) goes through the parsers in test_code_blocks.py.
"""

from __future__ import annotations

import json
import shlex
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest

from megatron_dynbatch import RolloutDirectory, Sample
from megatron_dynbatch.report import read_step_reports
from megatron_dynbatch.report.identity import read_identity
from tests.cli.run_folder import write_run
from tests.docs.test_code_blocks import all_commands
from tests.examples.launching import launch
from tests.package.installed import build_wheel, install
from tests.pool import ROOT

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

PLACEHOLDERS = {"DIR": "rollouts", "RUN_DIR": "run"}
# Tools of others and jobs of the checkout, a second run of verify, and a Ray cluster.
NOT_RUN = ("make", "pip", "git", "pre-commit", "docker", ".venv/bin/python")
NOT_RUN_TEXTS = ("your_script.py", "ray://", "examples/pretrain_gpt_sft.py --sft")
# Doctor finds one thing here: `pretrain_gpt.py` without Transformer Engine would train on a GPU.
CODES = {"doctor": (0, 1)}

SMALL: dict[str, str | None] = {  # None: the flag is left out
    "--num-layers": "2", "--hidden-size": "64", "--ffn-hidden-size": "128",
    "--num-attention-heads": "4", "--num-query-groups": "2", "--max-position-embeddings": "512",
    "--max-tokens-per-gpu": "256", "--tokens-per-step": "512", "--rollouts-per-step": "8",
    "--groups": "2", "--train-samples": "16", "--lr-warmup-samples": "4", "--vocab-size": "257",
    "--context-parallel-size": "1", "--pipeline-model-parallel-size": "1", "--pipeline-size": "2",
    "--tensor-model-parallel-size": "2", "--tokenizer-type": "NullTokenizer",
    "--tokenizer-model": None, "--load": None, "--save": None, "--save-interval": None,
    "--attention-backend": None, "--rotary-base": "10000", "--lr-decay-rollouts": "100",
}  # fmt: skip
LEFT_OUT = ("--finetune",)
# For `…`, where a page leaves a script's own flags to the reader.
OWN_FLAGS = (
    "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --max-position-embeddings 512 "
    "--lr 1e-3 --lr-decay-style constant --train-samples 16 --eval-iters 0 "
    "--attention-dropout 0 --hidden-dropout 0 --tokenizer-type NullTokenizer --vocab-size 257"
).split()


def write_rollouts(path: Path, count: int = 24) -> None:
    """Rollouts of one to three short samples, and END."""
    draw = np.random.default_rng(0)
    directory = RolloutDirectory(path)
    directory.write([
        Sample(draw.integers(0, 120, int(draw.integers(6, 60))), response_length=4, rollout_id=r)
        for r in range(count)
        for _ in range(1 + r % 3)
    ])  # fmt: skip
    directory.finish()


def write_inputs(folder: Path) -> None:
    """What a reader of the pages has: rollouts, a run, conversations, times, a stock script."""
    write_rollouts(folder / "rollouts")
    (folder / "run").mkdir()
    write_run(folder / "run", num_batches=12)
    line = {"messages": [{"role": "user", "content": "2 + 3?"},
                         {"role": "assistant", "content": "5, of course."}]}  # fmt: skip
    (folder / "chats.jsonl").write_text((json.dumps(line) + "\n") * 12)
    times = [{"lengths": [n], "seconds": 1e-5 * n + 1e-3} for n in (100, 900, 4000, 9000)]
    (folder / "times.jsonl").write_text("".join(json.dumps(row) + "\n" for row in times))
    shutil.copy(ROOT / "examples" / "pretrain_gpt_sft.py", folder / "pretrain_gpt.py")


def runs_here(words: list[str]) -> bool:
    """Whether a command runs on a CPU as it is."""
    text = " ".join(words)
    if words[0] in NOT_RUN or any(part in text for part in NOT_RUN_TEXTS):
        return False
    return words[0] not in ("torchrun", "srun") or "--cpu" in words


def test_what_runs_on_a_cpu_runs_from_the_wheel(tmp_path: Path) -> None:
    (tmp_path / "dist").mkdir()
    environment = install(build_wheel(tmp_path / "dist"), tmp_path / "environment")
    folder = tmp_path / "elsewhere"
    folder.mkdir()
    write_inputs(folder)
    commands = [c for c in all_commands() if runs_here(c[1])]
    commands.append(("custom_step_splitter.py", "python examples/custom_step_splitter.py".split()))
    commands.sort(key=lambda c: c[1][1] != "examples")  # they bring the scripts of the others
    done_before = set[str]()
    for place, words in commands:
        text = shlex.join(PLACEHOLDERS.get(word, word) for word in words)
        if text in done_before:
            continue
        done_before.add(text)
        shutil.rmtree(folder / "runs", ignore_errors=True)
        done = subprocess.run(
            ["bash", "-c", text], cwd=folder, env=environment, capture_output=True, text=True,
            timeout=600,
        )  # fmt: skip
        said = f"{place}: {text}\n{done.stdout[-2000:]}{done.stderr[-3000:]}"
        assert done.returncode in CODES.get(words[1], (0,)), said
        assert "Traceback" not in done.stderr, said
        for report in (folder / "runs").rglob("steps.jsonl"):
            assert read_step_reports(report), said
            assert "[megatron_dynbatch] step 1" in done.stdout, said
            # Ours do not drown: the lines of a run are few.
            assert len(done.stdout.splitlines()) + len(done.stderr.splitlines()) < 60, said
    assert len(done_before) >= 15


def scaled(words: list[str], folder: Path) -> list[str]:
    """The script and the arguments of a command of real size, with the numbers of `SMALL`."""
    rest = words[words.index("torchrun") + 1 :]
    if "megatron_dynbatch.run" in rest:
        rest = rest[rest.index("megatron_dynbatch.run") + 1 :]
    else:  # a script that installs the plugin itself
        rest = rest[next(n for n, word in enumerate(rest) if word.endswith(".py")) :]
    named = {"pretrain_gpt.py": "examples/pretrain_gpt_sft.py", "DIR": str(folder / "rollouts")}
    rest = [named.get(word, word).replace("/shared", str(folder)) for word in rest]
    small: list[str] = []
    pairs = zip(rest, [*rest[1:], ""], strict=True)
    skip = False
    for word, value in pairs:
        if skip or word in LEFT_OUT:
            skip = False
        elif word in SMALL and not (word == "--rollouts-per-step" and value == "batch"):
            skip = True
            small += [word, SMALL[word]] if SMALL[word] is not None else []  # type: ignore[list-item]
        else:
            small.append(word)
    own_loop = "own_loop" in " ".join(small)
    for name, flag in zip(OWN_FLAGS, [*OWN_FLAGS[1:], ""], strict=True):
        if name.startswith("--") and name not in small and not own_loop:
            small += [name, flag]
    return small if own_loop else [*small, "--step-report", str(folder / "out" / "steps.jsonl")]


# By its words: what two pages print alike runs once.
_PRINTED = {tuple(words): place for place, words in reversed(all_commands())}
REAL = [
    pytest.param(list(words), id=place)
    for words, place in _PRINTED.items()
    if words[0] in ("torchrun", "srun")
    and "--cpu" not in words
    and not any(part in " ".join(words) for part in NOT_RUN_TEXTS)
]


@pytest.mark.parametrize("words", REAL)
def test_what_is_of_real_size_runs_with_small_numbers(words: list[str], tmp_path: Path) -> None:
    if "examples.grpo_sync" in words:
        pytest.importorskip("reasoning_gym")
    chats = "--chat-jsonl" in words
    write_inputs(tmp_path)
    if chats:  # the script writes the rollouts
        shutil.rmtree(tmp_path / "rollouts")
    launch(2, scaled(words, tmp_path))
    if "own_loop" not in " ".join(words):
        reports = read_step_reports(tmp_path / "out" / "steps.jsonl")
        assert reports and all(np.isfinite(list(r.metrics.values())).all() for r in reports)
        # The run is named beside them, for `report`.
        identity = read_identity(tmp_path / "out" / "steps.jsonl")
        assert identity["model"]["num_layers"] == "2" and identity["layout"]["tp"] in (1, 2)
        # On-policy: the sampler's log-probs (rotary, shared keys, bfloat16) are the model's own.
        ratios = [r.metrics["ratio"] for r in reports if "ratio" in r.metrics]
        assert ratios == pytest.approx([1.0] * len(ratios), abs=1e-3)
