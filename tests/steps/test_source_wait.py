"""A path that is not there is said at once, is made by nobody who reads, and ends the run soon."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
import torch.distributed as dist

from megatron_dynbatch.plan import ParallelLayout, PlanOptions
from megatron_dynbatch.rollouts import RolloutDataError, RolloutDirectory, Sample
from megatron_dynbatch.steps import Exchange, StepFeed, config
from megatron_dynbatch.steps.exchange import RankFailure

SAMPLES = [Sample([1, 2, 3], 2)]


def feed(path: Path, **options: object) -> StepFeed:
    chosen = PlanOptions(max_tokens_per_gpu=16)
    return StepFeed(RolloutDirectory(path), ParallelLayout(), chosen, **options)  # type: ignore[arg-type]


def test_a_mistyped_path_is_an_error_on_all_ranks_and_is_not_made(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(config, "GRACE_SECONDS", 0.1)
    store = dist.HashStore()
    exchanges = [Exchange(store, rank, 2, timeout=600.0) for rank in range(2)]
    first, second = (feed(tmp_path / "rolouts", batch_timeout=600.0, exchange=e) for e in exchanges)
    errors: list[BaseException] = []

    def other() -> None:
        try:
            second.open_step()
        except RankFailure as error:
            errors.append(error)

    thread = threading.Thread(target=other)
    thread.start()
    with pytest.raises(RolloutDataError, match=r"rolouts.* is not there, looked for during 0.1 s"):
        first.open_step()
    thread.join()
    assert "rank 0: RolloutDataError: " in str(errors[0]) and "--wait-for-path" in str(errors[0])
    said = [line for line in capsys.readouterr().out.splitlines() if "is not there" in line]
    assert len(said) == 1 and "(is --rollout-path right?)" in said[0]
    assert list(tmp_path.iterdir()) == []
    first.close(), second.close()


def test_how_long_is_waited(tmp_path: Path) -> None:
    assert feed(tmp_path).config.path_timeout == 60.0
    assert feed(tmp_path, batch_timeout=5.0).config.path_timeout == 5.0
    assert feed(tmp_path, batch_timeout=900.0, wait_for_path=True).config.path_timeout == 900.0


def test_a_rollout_side_that_comes_later_is_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps = feed(tmp_path / "r", wait_for_path=True)
    looks: list[bool] = []
    look = RolloutDirectory.is_there

    def is_there(directory: RolloutDirectory) -> bool:
        looks.append(look(directory))
        if len(looks) == 2:
            monkeypatch.undo()
            RolloutDirectory(tmp_path / "r").write(SAMPLES)
        return looks[-1]

    monkeypatch.setattr(RolloutDirectory, "is_there", is_there)
    step = steps.open_step()
    assert looks == [False, False] and step is not None and step.batch_id == 0
    assert RolloutDirectory(tmp_path / "r").published("layout") is not None
    steps.close()


def test_an_empty_directory_gets_the_layout_at_once(tmp_path: Path) -> None:
    steps = feed(tmp_path, batch_timeout=0.2)
    with pytest.raises(TimeoutError):
        steps.open_step()
    assert RolloutDirectory(tmp_path).published("layout") is not None
    steps.close()


def test_a_program_that_is_the_rollout_side_itself_makes_it(tmp_path: Path) -> None:
    def write(cursor: object) -> None:
        RolloutDirectory(tmp_path / "r").write(SAMPLES)

    steps = feed(tmp_path / "r", on_batch_needed=write)
    assert steps.open_step() is not None
    steps.close()


def test_something_else_at_the_path_is_an_error_at_once(tmp_path: Path) -> None:
    (tmp_path / "data.txt").write_text("")
    with pytest.raises(RolloutDataError, match="is not a rollout directory"):
        feed(tmp_path).open_step()
