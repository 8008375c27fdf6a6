"""The task: spell a word backward, by characters, with reasoning-gym's verifier as reward.

Three kinds of prompts; words stand right-aligned in five characters:

    __cat>           spell it backward
    __tca_ __cat>    the same after a wrong attempt, which is all that is kept of what went before;
    __tcat __cat>    ... with a hint, the first letter of the answer (written without the space)
    __cat?           give a hint (asked of a sub-agent)
"""

from __future__ import annotations

import random
import string
from collections.abc import Sequence
from typing import Any

import reasoning_gym

from megatron_dynbatch import RolloutDirectory, Sample

CHARACTERS = string.ascii_lowercase + "_>?"
END = len(CHARACTERS)
VOCAB_SIZE = 32
"""Characters, END, and two ids that are never right, so that Megatron has nothing to pad."""

MAX_RESPONSE = 6
WORD_LENGTHS = (3, 5)


def answer_prompt(word: str, wrong: str = "", hint: str = "") -> str:
    """Asks for the word spelt backward; given a wrong attempt, as a retry."""
    history = f"{_aligned(wrong)}{hint or '_'}" if wrong else ""
    return f"{history}{_aligned(word)}>"


def hint_prompt(word: str) -> str:
    """Asks the sub-agent for the first letter of the answer."""
    return f"{_aligned(word)}?"


def _aligned(word: str) -> str:
    width = WORD_LENGTHS[1]
    return f"{word[:width]:_>{width}}"


def encode(text: str) -> list[int]:
    """Token ids of a text."""
    return [CHARACTERS.index(character) for character in text]


def decode(tokens: Sequence[int]) -> str:
    """The letters of a response up to END; whatever else it holds is shown as a mark."""
    text = ""
    for token in tokens:
        if token == END:
            break
        text += CHARACTERS[token] if token < END else "?"
    return text


class Spelling:
    """Words to spell backward, each with the verifier's entry.

    Args:
        seed: Of the words.
        size: How many there are.
    """

    def __init__(self, seed: int, size: int) -> None:
        shortest, longest = WORD_LENGTHS
        self._dataset = reasoning_gym.create_dataset(
            "spell_backward",
            min_word_len=shortest,
            max_word_len=longest,
            seed=seed,
            size=size,
        )

    def entry(self, number: int) -> dict[str, Any]:
        """The verifier's entry of a word that has letters only."""
        while not (found := self._dataset[number % len(self._dataset)])["metadata"][
            "word"
        ].isalpha():
            number += 1
        return found

    def score(self, answer: str, entry: dict[str, Any]) -> float:
        """Between 0 and 1: the share of letters in their right place."""
        return self._dataset.score_answer(answer, entry)


def word_of(entry: dict[str, Any]) -> str:
    """The word in lower case, which the verifier does not distinguish."""
    return entry["metadata"]["word"].lower()


def write_demonstrations(directory: RolloutDirectory, step_sizes: Sequence[int], seed: int) -> None:
    """Write supervised rollouts for the warm-up, one batch per step, and the END marker.

    Each shows one word solved at once, and sometimes a retry and a hint for the same word.

    Args:
        directory: Where to.
        step_sizes: Rollouts of each step.
        seed: Of words and of what is shown.
    """
    draw = random.Random(seed)
    words = Spelling(seed, sum(step_sizes))
    number = 0
    for size in step_sizes:
        samples: list[Sample] = []
        for rollout_id in range(size):
            word = word_of(words.entry(number))
            samples += _demonstration(word, rollout_id, draw)
            number += 1
        directory.write(samples)
    directory.finish()


def _demonstration(word: str, rollout_id: int, draw: random.Random) -> list[Sample]:
    answer = word[::-1]
    shown = [(answer_prompt(word), answer)]
    if draw.random() < 0.4:
        wrong = "".join(draw.sample(word, len(word)))
        hint = answer[0] if draw.random() < 0.5 else ""
        shown.append((answer_prompt(word, wrong, hint), answer))
    if draw.random() < 0.3:
        shown.append((hint_prompt(word), answer[0]))
    return [
        Sample(
            encode(prompt + response) + [END],
            response_length=len(response) + 1,
            rollout_id=rollout_id,
        )
        for prompt, response in shown
    ]
