"""Word problems with worked solutions, written as rollouts of 1 to 4 samples.

A rollout is one sitting in which 1 to 4 problems are answered; each problem with its solution is a
sample of its own. Prompts are not trained on.
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import reasoning_gym

from megatron_dynbatch import RolloutDirectory, Sample

# Words, single digits, white space and punctuation each are a token.
_TOKEN = re.compile(r"[A-Za-z]+|\d|\s|.")
_END = "<end>"
_MAX_SAMPLES = 4


class WordVocabulary:
    """Token ids for the words of some texts; a word that they lack has no id.

    Args:
        texts: Everything that will be encoded.
    """

    def __init__(self, texts: Iterable[str]) -> None:
        words = sorted({word for text in texts for word in _TOKEN.findall(text)})
        self._ids = {word: i for i, word in enumerate([_END, *words])}

    def __len__(self) -> int:
        return len(self._ids)

    def encode(self, text: str) -> list[int]:
        """The ids of a text."""
        return [self._ids[word] for word in _TOKEN.findall(text)]

    @property
    def end(self) -> int:
        """The id that closes a response."""
        return self._ids[_END]


@dataclass(frozen=True)
class Written:
    """What was written.

    Attributes:
        num_rollouts: Over all steps.
        num_samples: Over all steps.
        vocab_size: Token ids are below it.
        longest: Tokens of the longest sample.
    """

    num_rollouts: int
    num_samples: int
    vocab_size: int
    longest: int


def write_worked_solutions(directory: Path, step_sizes: Sequence[int], seed: int) -> Written:
    """Write one batch of rollouts per step, then the END marker.

    Args:
        directory: Rollout directory to make.
        step_sizes: Rollouts of each step.
        seed: Of problems and of samples per rollout.
    """
    draw = random.Random(seed)
    fan_out = [[draw.randint(1, _MAX_SAMPLES) for _ in range(size)] for size in step_sizes]
    num_samples = sum(map(sum, fan_out))
    problems = reasoning_gym.create_dataset("gsm_symbolic", size=num_samples, seed=seed)
    pairs = [(p["question"] + "\n", p["metadata"]["answer_cot"]) for p in problems]
    vocabulary = WordVocabulary(text for pair in pairs for text in pair)
    rollouts = RolloutDirectory(directory, vocab_size=len(vocabulary))
    remaining = iter(pairs)
    longest = 0
    for sizes in fan_out:
        samples = [
            _sample(*next(remaining), vocabulary, rollout_id)
            for rollout_id, size in enumerate(sizes)
            for _ in range(size)
        ]
        longest = max(longest, *(sample.total_length for sample in samples))
        rollouts.write(samples)
    rollouts.finish()
    return Written(sum(step_sizes), num_samples, len(vocabulary), longest)


def _sample(question: str, solution: str, vocabulary: WordVocabulary, rollout_id: int) -> Sample:
    response = [*vocabulary.encode(solution), vocabulary.end]
    tokens = vocabulary.encode(question) + response
    return Sample(tokens, response_length=len(response), rollout_id=rollout_id)
