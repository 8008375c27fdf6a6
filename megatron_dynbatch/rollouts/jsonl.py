"""Import of samples from JSON lines."""

import os
from pathlib import Path

from megatron_dynbatch.rollouts.checked_paths import checked_path
from megatron_dynbatch.rollouts.errors import RolloutDataError
from megatron_dynbatch.rollouts.limits import MAX_LINE_BYTES
from megatron_dynbatch.rollouts.sample import OPTIONAL_FIELDS, Sample
from megatron_dynbatch.rollouts.strict_json import parse_json
from megatron_dynbatch.rollouts.validation import validate_samples

_IDS = ("rollout_id", "group_id", "policy_version")
_KEYS = ("tokens", "response_length", "loss_mask", *_IDS, *OPTIONAL_FIELDS)


def read_jsonl(path: str | os.PathLike[str], *, vocab_size: int | None = None) -> list[Sample]:
    """Reads one sample per line: an object whose keys are the arguments of `Sample`.

    Empty lines are passed over; NaN and Infinity are read as such. A key that is there twice is an
    error.

    Args:
        path: A UTF-8 file, `{"tokens": [5, 6, 7], "response_length": 2, "rollout_id": 0}` a line.
        vocab_size: Token ids must be below it, if given.

    Raises:
        FileNotFoundError: There is no such file.
        OptionError: No file can have that path.
        RolloutDataError: A line is not such an object, has more than `MAX_LINE_BYTES`, or
            `validate_samples` rejects it; file and line (from 1) are named.
    """
    samples: list[Sample] = []
    numbers: list[int] = []
    path = checked_path(path)
    with open(path, "rb") as file:
        lines = iter(lambda: file.readline(MAX_LINE_BYTES + 1), b"")
        for number, line in enumerate(lines, start=1):
            if len(line) > MAX_LINE_BYTES:
                raise RolloutDataError(
                    f"{path}: line {number} has more than {MAX_LINE_BYTES} bytes; one sample a line"
                )
            if line.strip():
                samples.append(_sample(path, number, line))
                numbers.append(number)
    validate_samples(samples, vocab_size=vocab_size, rows=numbers, where=str(path), row_word="line")
    return samples


def _sample(path: Path, number: int, line: bytes) -> Sample:
    try:
        record = parse_json(line, allow_non_finite=True)
        if not isinstance(record, dict):
            raise ValueError("not a JSON object")
        if unknown := sorted(set(record).difference(_KEYS)):
            raise ValueError(f"unknown keys {unknown}; known are {', '.join(_KEYS)}")
        if "tokens" not in record:
            raise ValueError("tokens are missing")
        return Sample(**record)
    except ValueError as error:
        raise RolloutDataError(f"{path}: line {number}: {error}") from error
