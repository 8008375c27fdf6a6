"""The demo's task, agent, advantages, control and files, without Megatron."""

from __future__ import annotations

import json
import random
from pathlib import Path

import numpy as np
import pytest

from examples.demo.agent import (
    Call,
    Episode,
    Response,
    group_advantages,
    play,
    to_samples,
)
from examples.demo.control import fixed_batch_control
from examples.demo.task import (
    CHARACTERS,
    END,
    Spelling,
    answer_prompt,
    decode,
    encode,
    hint_prompt,
    word_of,
    write_demonstrations,
)
from examples.demo.training import TrainingFailed, drop_partial_line, read_json_lines, train
from megatron_dynbatch import RolloutDirectory
from megatron_dynbatch.rollouts import SampleIndex


def response(text: str) -> Response:
    tokens = [*encode(text), END]
    return Response(tokens, [-0.5] * len(tokens))


def perfect(prompts: list[list[int]]) -> list[Response]:
    """Reads the word from the end of the prompt, as the prompts document it."""
    answers = []
    for prompt in prompts:
        text = decode(prompt)
        answer = text[-6:-1].strip("_")[::-1]
        answers.append(response(answer[0] if text.endswith("?") else answer))
    return answers


def stubborn(prompts: list[list[int]]) -> list[Response]:
    return [response("zzz") for _ in prompts]


def test_prompts_are_what_the_task_documents() -> None:
    assert answer_prompt("cat") == "__cat>"
    assert answer_prompt("cat", wrong="tca") == "__tca___cat>"
    assert answer_prompt("cat", wrong="tca", hint="t") == "__tcat__cat>"
    assert hint_prompt("cat") == "__cat?"
    assert set(CHARACTERS) >= set("__tcat__cat>?")


def test_the_verifier_scores_letters_in_place() -> None:
    words = Spelling(seed=1, size=50)
    entry = words.entry(0)
    answer = word_of(entry)[::-1]
    assert words.score(answer, entry) == 1.0
    assert words.score("", entry) == 0.0
    assert words.score(answer[:-1], entry) == pytest.approx(1 - 1 / len(answer))


def test_a_right_answer_ends_the_episode_with_one_sample() -> None:
    episodes = play(Spelling(1, 50), range(2), perfect, random.Random(0))
    assert {e.group_id for e in episodes} == {0, 1}
    assert 8 <= len(episodes) <= 16
    assert all(len(e.calls) == 1 and e.reward == 1.0 for e in episodes)


def test_wrong_answers_are_retried_with_the_last_one_as_history() -> None:
    episodes = play(Spelling(1, 50), range(3), stubborn, random.Random(0))
    assert all(e.turns == 3 for e in episodes)
    prompts = {decode(call.prompt) for e in episodes for call in e.calls}
    assert any(p.startswith("__zzz_") for p in prompts)
    hinted = [e for e in episodes if len(e.calls) > 3]
    assert hinted and len(hinted) < len(episodes)
    for episode in hinted:
        kinds = [decode(call.prompt)[-1] for call in episode.calls]
        after_hint = kinds.index("?") + 1
        assert decode(episode.calls[after_hint].prompt)[5] == "z"


def episode(group: int, scores: list[float], reward: float) -> Episode:
    calls = [Call(encode("__cat>"), response("tac"), score) for score in scores]
    return Episode(group, {}, calls, turns=len(calls), reward=reward)


def test_advantages_are_scores_standardised_over_the_calls_of_a_group() -> None:
    episodes = [episode(7, [0.0, 1.0], 0.5), episode(7, [1.0, 2.0], 0.5), episode(9, [1.0], 1.0)]
    first, second, equal = group_advantages(episodes)
    # Mean 1, population standard deviation √½.
    assert first == pytest.approx([-np.sqrt(2), 0.0])
    assert second == pytest.approx([0.0, np.sqrt(2)])
    assert equal == [0.0]


def test_groups_that_teach_nothing_are_left_out_but_one_is_kept() -> None:
    episodes = [episode(0, [1.0], 1.0), episode(1, [0.0, 1.0], 0.5)]
    samples = to_samples(episodes, group_advantages(episodes))
    assert [s.rollout_id for s in samples] == [1, 1]
    assert [s.advantage for s in samples] == [-1.0, 1.0]
    alone = [episode(0, [1.0], 1.0)]
    assert len(to_samples(alone, group_advantages(alone))) == 1


def test_demonstrations_differ_in_size_and_end(tmp_path: Path) -> None:
    directory = RolloutDirectory(tmp_path / "rollouts")
    write_demonstrations(directory, [3, 5], seed=1)
    assert directory.index(0).num_rollouts == 3
    assert directory.index(1).num_rollouts == 5
    assert directory.state(2) == "end"
    first = directory.read(0, [0])[0]
    word = decode(first.tokens[:6].tolist()).strip("_>")
    assert decode(first.tokens[6:].tolist()) == word[::-1]


def test_control_counts_what_a_fixed_batch_does() -> None:
    ids = [0, 0, 1, 1, 1, 2, 2]  # 7 samples; fixed at 4: one step, rollout 1 torn, 2 dropped
    ones = np.ones(len(ids), dtype=np.int64)
    index = SampleIndex(2 * ones, ones, ones, np.array(ids), -ones)
    rows = [{"samples": 4}, {"samples": 5}, {"samples": 4}]
    found = fixed_batch_control([index], rows, dp_size=2)
    assert found == {
        "fixed_size": 4, "samples": 7, "dropped_samples": 3, "rollouts": 3, "torn_rollouts": 2,
        "padded_samples": 1, "smallest_scale": 0.75, "mean_scale": 0.875, "steps": 1,
        "actual_steps": 3,
    }  # fmt: skip


def test_a_line_cut_short_by_a_kill_is_left_out(tmp_path: Path) -> None:
    file = tmp_path / "lines.jsonl"
    assert read_json_lines(file) == []
    file.write_text(json.dumps({"a": 1}) + "\n" + '{"a": 2')
    assert read_json_lines(file) == [{"a": 1}]
    drop_partial_line(file)
    assert file.read_text() == json.dumps({"a": 1}) + "\n"


@pytest.mark.slow
def test_a_failure_is_told_in_one_line(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text("raise ValueError('no such thing; do that')\n")
    with pytest.raises(TrainingFailed, match="^ValueError: no such thing; do that .the whole log"):
        train([str(script)], tmp_path / "steps.jsonl", tmp_path / "log", lambda report: None)
