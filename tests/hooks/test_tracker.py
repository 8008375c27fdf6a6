"""A tracker file that a kill left empty names the newest complete checkpoint again."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron_dynbatch.errors import ResumeError
from megatron_dynbatch.hooks.tracker import TRACKER, completed_iteration, mend_tracker


def checkpoint(folder: Path, iteration: int, sign: str) -> None:
    place = folder / f"iter_{iteration:07d}" / sign
    place.parent.mkdir(parents=True)
    place.touch()


@pytest.mark.parametrize("sign", ["metadata.json", "mp_rank_00/model_optim_rng.pt"])
def test_the_newest_complete_checkpoint_is_named(
    sign: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for iteration in (9, 12, 100):
        checkpoint(tmp_path, iteration, sign)
    checkpoint(tmp_path, 103, "__0_0.distcp")  # its last file was not written
    (tmp_path / TRACKER).touch()
    assert completed_iteration(tmp_path) == -1
    mend_tracker(tmp_path)
    assert completed_iteration(tmp_path) == 100
    assert "names iteration 100 again" in capsys.readouterr().out


@pytest.mark.parametrize("text", ["9\n", "release"])
def test_what_megatron_can_read_stays(text: str, tmp_path: Path) -> None:
    checkpoint(tmp_path, 12, "metadata.json")
    (tmp_path / TRACKER).write_text(text)
    mend_tracker(tmp_path)
    assert (tmp_path / TRACKER).read_text() == text


def test_a_folder_without_a_checkpoint_is_left_alone(tmp_path: Path) -> None:
    mend_tracker(tmp_path / "absent")
    mend_tracker(tmp_path)
    assert list(tmp_path.iterdir()) == []
    (tmp_path / TRACKER).touch()
    with pytest.raises(ResumeError, match="is empty, as after a kill .* remove it to start"):
        mend_tracker(tmp_path)
