"""Agentic rollouts: retries with a compacted history, hints of a sub-agent, GRPO advantages."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from examples.demo.task import Spelling, answer_prompt, decode, encode, hint_prompt, word_of
from megatron_dynbatch import Sample

MAX_TURNS = 3
HINT_CHANCE = 0.3
RETRY_FACTOR = 0.5
GROUP_SIZES = (4, 8)


@dataclass(frozen=True)
class Response:
    """What the policy answered.

    Attributes:
        tokens: Sampled token ids [R].
        log_probs: Of each of them [R], under the policy that sampled them.
    """

    tokens: list[int]
    log_probs: list[float]


Policy = Callable[[list[list[int]]], list[Response]]
"""Prompts as token ids → one response each."""


@dataclass
class Call:
    """One call of the policy: a training sample.

    Attributes:
        prompt: Token ids.
        response: What it answered.
        score: The verifier's score of the answer, or of the answer that a hint led to.
    """

    prompt: list[int]
    response: Response
    score: float = 0.0


@dataclass
class Episode:
    """One rollout of the agent.

    Attributes:
        group_id: Its prompt group.
        entry: The verifier's entry of the word.
        calls: Every call of the policy, in order.
        answer: The last answer.
        hint: Letter that the sub-agent gave, not used yet.
        turns: Answers given.
        reward: Set when the episode is over.
    """

    group_id: int
    entry: dict[str, Any]
    calls: list[Call] = field(default_factory=list)
    answer: str = ""
    hint: str = ""
    turns: int = 0
    reward: float | None = None

    def prompt(self) -> list[int]:
        """What the agent sees at this turn: of earlier turns only the last answer is kept."""
        word = word_of(self.entry)
        if self.turns == 0:
            return encode(answer_prompt(word))
        return encode(answer_prompt(word, _letters(self.answer) or "_", self.hint))

    def receive(self, prompt: list[int], response: Response, words: Spelling) -> None:
        """Take an answer; the episode ends if it is right, or the last one allowed."""
        self.answer = decode(response.tokens)
        score = words.score(self.answer, self.entry)
        if self.hint:
            self.calls[-1].score = score
        self.calls.append(Call(prompt, response, score))
        self.hint = ""
        self.turns += 1
        if score == 1.0 or self.turns == MAX_TURNS:
            self.reward = score * RETRY_FACTOR ** (self.turns - 1)

    def receive_hint(self, prompt: list[int], response: Response) -> None:
        """Take the sub-agent's hint: a sample of this rollout too."""
        self.calls.append(Call(prompt, response))
        self.hint = _letters(decode(response.tokens))[:1]


def groups_of_batch(batch_id: int, average: int, draw: random.Random) -> range:
    """Prompt groups of a batch: half to one and a half times the average, as they come in."""
    first = batch_id * 2 * average
    return range(first, first + draw.randint(average // 2, average + average // 2))


def _letters(text: str) -> str:
    return "".join(character for character in text if character.isalpha())


def play(
    words: Spelling, groups: Iterable[int], policy: Policy, draw: random.Random
) -> list[Episode]:
    """Play groups of 4 to 8 episodes of one word each, all at once, to the end.

    Args:
        words: The task.
        groups: Numbers of the groups; each also picks the group's word.
        policy: Answers prompts.
        draw: Of group sizes and hints.
    """
    episodes = [
        Episode(group, words.entry(group))
        for group in groups
        for _ in range(draw.randint(*GROUP_SIZES))
    ]
    for turn in range(MAX_TURNS):
        active = [e for e in episodes if e.reward is None]
        if not active:
            break
        if turn > 0:
            _ask_for_hints([e for e in active if draw.random() < HINT_CHANCE], policy)
        prompts = [e.prompt() for e in active]
        for episode, prompt, response in zip(active, prompts, policy(prompts), strict=True):
            episode.receive(prompt, response, words)
    return episodes


def _ask_for_hints(episodes: Sequence[Episode], policy: Policy) -> None:
    if not episodes:
        return
    prompts = [encode(hint_prompt(word_of(e.entry))) for e in episodes]
    for episode, prompt, response in zip(episodes, prompts, policy(prompts), strict=True):
        episode.receive_hint(prompt, response)


def group_advantages(episodes: Sequence[Episode]) -> list[list[float]]:
    """(score − mean) / standard deviation over all calls of a prompt group.

    GRPO (arXiv:2402.03300, section 4.1.3), with the verifier's score of each turn as its reward.

    Returns:
        One per call of each episode; 0 in a group whose scores are all equal.
    """
    scores: dict[int, list[float]] = {}
    for episode in episodes:
        scores.setdefault(episode.group_id, []).extend(call.score for call in episode.calls)
    mean = {group: float(np.mean(own)) for group, own in scores.items()}
    # An equal group has deviations of 0 already.
    std = {group: float(np.std(own)) or 1.0 for group, own in scores.items()}
    return [
        [(call.score - mean[e.group_id]) / std[e.group_id] for call in e.calls] for e in episodes
    ]


def to_samples(episodes: Sequence[Episode], advantages: Sequence[Sequence[float]]) -> list[Sample]:
    """Training samples of the episodes; groups without any advantage are left out.

    At least one group is kept, so that a batch is never empty.
    """
    teaching = {e.group_id for e, own in zip(episodes, advantages, strict=True) if any(own)} or {
        episodes[0].group_id
    }
    return [
        Sample(
            call.prompt + call.response.tokens,
            response_length=len(call.response.tokens),
            rollout_id=rollout_id,
            group_id=episode.group_id,
            reward=episode.reward,
            advantage=advantage,
            log_probs=call.response.log_probs,
        )
        for rollout_id, (episode, own) in enumerate(zip(episodes, advantages, strict=True))
        if episode.group_id in teaching
        for call, advantage in zip(episode.calls, own, strict=True)
    ]
