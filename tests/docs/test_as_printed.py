"""Commands and code of the pages and the examples, run as they are printed.

What runs on a CPU runs from the installed wheel, in a folder outside the checkout, with the
placeholders filled from `printed.PLACEHOLDERS`. Commands of real size run with the numbers of
`printed.SMALL`, in processes of the pool. What is not run has its reason in `printed.NOT_RUN`;
test_code_blocks.py parses those.
"""

from __future__ import annotations

import json
import os
import shlex
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from megatron_dynbatch import RolloutDirectory, Sample
from megatron_dynbatch.report import read_step_reports
from megatron_dynbatch.report.identity import read_identity
from megatron_dynbatch.rollouts import RolloutTransport
from tests.cli.run_folder import write_run
from tests.docs.blocks import PAGES, blocks
from tests.docs.printed import NOT_RUN, PLACEHOLDERS, SCALED, scaled, why_not
from tests.docs.test_code_blocks import all_commands
from tests.examples.launching import launch
from tests.package.installed import build_wheel, install
from tests.pool import ROOT

# By its words: what two pages print alike runs once.
PRINTED = {tuple(words): place for place, words in reversed(all_commands())}
# Doctor finds one thing here: `pretrain_gpt.py` without Transformer Engine would train on a GPU.
CODES = {"doctor": (0, 1)}
EXAMPLES_COPIED = ("megatron-dynbatch", "examples", ".")
LINES = 60
"""Of the output of a training at most: ours do not drown."""


def is_long(words: tuple[str, ...]) -> bool:
    """A minute and more: ten trainings, or reinforcement learning."""
    return "verify" in words or "examples.grpo_async_ray" in words


def ids(words: tuple[str, ...]) -> str:
    return PRINTED[words]


AS_PRINTED = [words for words in PRINTED if why_not(list(words)) is None]
LONG = [words for words in AS_PRINTED if is_long(words)]
REAL = [words for words in PRINTED if why_not(list(words)) in SCALED]


def test_every_command_is_run_or_has_its_reason() -> None:
    unused = set(NOT_RUN)
    for words in PRINTED:
        unused -= {start for start in NOT_RUN if " ".join(words).startswith(start)}
    assert unused == set(), "a reason for nothing"
    assert len(AS_PRINTED) >= 18 and len(LONG) >= 3 and len(REAL) >= 12
    # Only these are left to the parsers of test_code_blocks.py.
    left = {words[0] for words in PRINTED if words not in AS_PRINTED and words not in REAL}
    assert left == {"make", "pip", ".venv/bin/python", "docker", "ray", "MEGATRON_LM=DIR"}


def test_code_that_is_no_whole_program_is_that_of_an_example() -> None:
    """integrate.md prints examples/sft.py (test_code_blocks.py); README its two lines."""
    pages = {page.name: blocks(page, "py") for page in PAGES if blocks(page, "py")}
    assert set(pages) == {"README.md", "integrate.md"}
    script = (ROOT / "examples" / "sft.py").read_text(encoding="utf-8")
    (fragment,) = pages["README.md"]
    install_line, batch_line = (line.split("#")[0].strip() for line in fragment.text.splitlines())
    assert install_line in script
    assert batch_line.replace("(it)", "(data_iterator)") in script


def write_rollouts(to: RolloutTransport, count: int = 24) -> None:
    """Rollouts of one to three short samples, and END."""
    draw = np.random.default_rng(0)
    samples = [
        Sample(draw.integers(0, 120, int(draw.integers(6, 60))), response_length=4, rollout_id=r,
               advantage=1.0 - 2 * (r % 2), log_probs=[-4.8] * 4)
        for r in range(count)
        for _ in range(1 + r % 3)
    ]  # fmt: skip
    to.write(samples)
    to.finish()


def write_inputs(folder: Path) -> None:
    """What a reader of the pages has: rollouts, a run, conversations, times, scripts."""
    write_rollouts(RolloutDirectory(folder / "rollouts"))
    (folder / "run").mkdir()
    write_run(folder / "run", num_batches=12)
    line = {"messages": [{"role": "user", "content": "2 + 3?"},
                         {"role": "assistant", "content": "5, of course."}]}  # fmt: skip
    (folder / "chats.jsonl").write_text((json.dumps(line) + "\n") * 12)
    times = [{"lengths": [n], "seconds": 1e-5 * n + 1e-3} for n in (100, 900, 4000, 9000)]
    (folder / "times.jsonl").write_text("".join(json.dumps(row) + "\n" for row in times))
    shutil.copy(ROOT / "examples" / "pretrain_gpt_sft.py", folder / "pretrain_gpt.py")
    # The mistake that losses.md shows: a mean of the micro-batch.
    right = "    return sft(output, microbatch, tp_group=mpu.get_tensor_model_parallel_group())\n"
    wrong = (
        "    mask = microbatch.loss_mask.reshape(-1)\n"
        "    loss = (output.reshape(-1) * mask).sum() / mask.sum().clamp(min=1)\n"
        '    return loss, {"lm loss": loss.detach()}\n'
    )
    script = (ROOT / "examples" / "sft.py").read_text(encoding="utf-8")
    assert script.count(right) == 1
    (folder / "mean_loss.py").write_text(script.replace(right, wrong), encoding="utf-8")


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Variables of a process that finds the installed wheel, and nothing of the checkout."""
    folder = tmp_path_factory.mktemp("wheel")
    (folder / "dist").mkdir()
    return install(build_wheel(folder / "dist"), folder / "environment")


@pytest.fixture
def elsewhere(tmp_path: Path, environment: dict[str, str]) -> Path:
    """A folder outside the checkout, with inputs and the examples."""
    write_inputs(tmp_path)
    run(shlex.join(EXAMPLES_COPIED), tmp_path, environment)
    return tmp_path


def run(
    text: str, folder: Path, environment: dict[str, str], codes: tuple[int, ...] = (0,)
) -> subprocess.CompletedProcess[str]:
    """Run a command in the shell; it ends with one of the codes and without a traceback."""
    done = subprocess.run(
        ["bash", "-c", text], cwd=folder, env=environment, capture_output=True, text=True,
        timeout=900,
    )  # fmt: skip
    said = f"{text}\n{done.stdout[-2000:]}{done.stderr[-3000:]}"
    assert done.returncode in codes and "Traceback" not in done.stderr, said
    return done


def as_typed(words: tuple[str, ...]) -> str:
    """A command with its placeholders filled."""
    return shlex.join(PLACEHOLDERS.get(word, word) for word in words)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_what_runs_on_a_cpu_runs_from_the_wheel(
    elsewhere: Path, environment: dict[str, str]
) -> None:
    for words in AS_PRINTED:
        if is_long(words):
            continue
        shutil.rmtree(elsewhere / "runs", ignore_errors=True)
        if words == EXAMPLES_COPIED:
            shutil.rmtree(elsewhere / "examples")
        done = run(as_typed(words), elsewhere, environment, CODES.get(words[1], (0,)))
        for report in (elsewhere / "runs").rglob("steps.jsonl"):
            assert read_step_reports(report)
            assert "[megatron_dynbatch] step 1" in done.stdout, done.stdout
            assert len((done.stdout + done.stderr).splitlines()) < LINES, done.stdout


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("words", LONG, ids=ids)
def test_what_takes_longer_runs_from_the_wheel(
    words: tuple[str, ...], elsewhere: Path, environment: dict[str, str]
) -> None:
    if "examples.grpo_async_ray" in words:
        pytest.importorskip("ray")
        pytest.importorskip("reasoning_gym")
    done = run(as_typed(words), elsewhere, environment)
    if "verify" in words:
        assert "\ninvariant: no quantity deviates" in done.stdout, done.stdout
    else:
        reports = read_step_reports(elsewhere / "runs" / "async" / "steps.jsonl")
        assert [report.batch_id for report in reports] == list(range(20))


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_what_a_session_shows_is_what_it_prints(
    elsewhere: Path, environment: dict[str, str]
) -> None:
    shown = [block for page in PAGES for block in blocks(page, "console")]
    sessions = [block for block in shown if block.text.startswith("$ ")]
    # The other is the table of a fault; tests/cli/test_verify_model.py plants it.
    assert [b.page.name for b in shown] == ["losses.md", "verify.md"] and len(sessions) == 1
    command, *lines = sessions[0].text.splitlines()
    done = run(command.removeprefix("$ "), elsewhere, environment, codes=(1,))
    for line in lines:
        for part in filter(None, line.split("…")):
            assert part in done.stdout, done.stdout


@pytest.mark.slow
@pytest.mark.parametrize("page", [p for p in PAGES if blocks(p, "python")], ids=lambda p: p.stem)
def test_code_runs_from_the_wheel(page: Path, tmp_path: Path, environment: dict[str, str]) -> None:
    text = "\n".join(block.text for block in blocks(page, "python"))
    (tmp_path / "page.py").write_text(text, encoding="utf-8")
    run("python page.py", tmp_path, environment)


@pytest.fixture(scope="module")
def ray_address() -> Iterator[str]:
    """Of a Ray of this machine alone."""
    ray = pytest.importorskip("ray")
    from megatron_dynbatch.rollouts.ray_local import start_local_ray

    start_local_ray(num_cpus=1, object_store_memory=2**28)
    yield f"ray://{ray.get_runtime_context().gcs_address}"
    ray.shutdown()


@pytest.fixture
def ray_rollouts(ray_address: str, tmp_path: Path) -> str:
    """The address of rollouts in that Ray."""
    from megatron_dynbatch.rollouts import open_transport

    path = f"{ray_address}/{tmp_path.name}"
    write_rollouts(open_transport(path))
    return path


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("words", REAL, ids=ids)
def test_what_is_of_real_size_runs_with_small_numbers(
    words: tuple[str, ...], tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    text = " ".join(words)
    if "examples.grpo" in text:
        pytest.importorskip("reasoning_gym")
    write_inputs(tmp_path)
    if "--chat-jsonl" in words:  # the script writes the rollouts
        shutil.rmtree(tmp_path / "rollouts")
    rollouts = request.getfixturevalue("ray_rollouts") if "ray://" in text else ""
    arguments = scaled(list(words), str(tmp_path), rollouts)
    is_reported = "--dynamic-global-batch" in words
    if is_reported:
        arguments += ["--step-report", str(tmp_path / "out" / "steps.jsonl")]
    # What a process inherits that is started where the Ray was: its switches and its token.
    switches = {name: value for name, value in os.environ.items() if name.startswith("RAY_")}
    launch(2, arguments, switches if rollouts else None)
    if not is_reported:
        return
    reports = read_step_reports(tmp_path / "out" / "steps.jsonl")
    assert reports and all(np.isfinite(list(r.metrics.values())).all() for r in reports)
    # The run is named beside them, for `report`.
    identity = read_identity(tmp_path / "out" / "steps.jsonl")
    assert identity["model"]["num_layers"] == "2" and identity["layout"]["tp"] in (1, 2)
    if "examples.grpo_sync" in words:
        # On-policy: the sampler's log-probs (rotary, shared keys, bfloat16) are the model's own.
        ratios = [r.metrics["ratio"] for r in reports]
        assert ratios == pytest.approx([1.0] * len(ratios), abs=1e-3)
