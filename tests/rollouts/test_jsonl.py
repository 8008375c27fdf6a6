"""Samples from JSON lines; errors name file and line."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megatron_dynbatch.rollouts import OPTIONAL_FIELDS, RolloutDataError, read_jsonl
from megatron_dynbatch.rollouts.sample import EXTRA_KINDS
from tests.rollouts.helpers import FIELDS, assert_same_samples, golden_samples, random_samples


def test_same_field_names(tmp_path: Path) -> None:
    none: dict[str, dict[str, Any]] = {kind: {} for kind in EXTRA_KINDS}  # not in JSON
    samples = golden_samples() + [replace(s, **none) for s in random_samples(20, seed=2)]
    lines = []
    for sample in samples:
        record = {name: getattr(sample, name) for name in (*FIELDS, *OPTIONAL_FIELDS)}
        plain = {k: v.tolist() if isinstance(v, np.ndarray) else v for k, v in record.items()}
        lines.append(json.dumps(plain))
    path = tmp_path / "r.jsonl"
    path.write_text("\n\n".join(lines[:4]) + "\n")
    assert_same_samples(read_jsonl(path), samples[:4])
    path.write_text("\n".join(lines[4:]))
    assert_same_samples(read_jsonl(path, vocab_size=1000), samples[4:])


def test_response_length_instead_of_a_mask(tmp_path: Path) -> None:
    path = tmp_path / "r.jsonl"
    path.write_text('{"tokens": [5, 6, 7], "response_length": 2, "advantage": 1}\n')
    (sample,) = read_jsonl(path)
    assert sample.loss_mask.tolist() == [1, 1] and sample.advantage == 1.0


GOOD = '{"tokens": [5, 6, 7], "response_length": 2}'


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "line 3: Expecting"),
        ("[1, 2]", "line 3: not a JSON object"),
        ('{"response_length": 2}', "line 3: tokens are missing"),
        ('{"tokens": [1, 2]}', "line 3: give response_length or loss_mask"),
        ('{"tokens": [1, 2], "response_length": 1, "logprobs": [1]}', r"line 3: .*\['logprobs'\]"),
        ('{"tokens": [1, "2"], "response_length": 1}', "line 3: tokens holds"),
        ('{"tokens": [1, 2], "response_length": 1e400}', "line 3: response_length is inf"),
        ('{"tokens": [1, 2], "loss_mask": [0, 3]}', "line 3, loss_mask: entry 1 is 3"),
        ('{"tokens": [1, 99], "response_length": 1}', "line 3, tokens: id 99 at position 1"),
        ("[" * 100_000, "line 3: "),
        ("\udcff", "line 3: "),
    ],
)
def test_errors_name_file_and_line(tmp_path: Path, line: str, message: str) -> None:
    path = tmp_path / "r.jsonl"
    path.write_bytes(f"{GOOD}\n\n{line}\n".encode(errors="surrogateescape"))
    with pytest.raises(RolloutDataError, match=message) as caught:
        read_jsonl(path, vocab_size=50)
    assert str(caught.value).startswith(f"{path}: line 3")


def test_no_lines(tmp_path: Path) -> None:
    (tmp_path / "r.jsonl").write_text("\n")
    with pytest.raises(RolloutDataError, match="r.jsonl: no rollouts"):
        read_jsonl(tmp_path / "r.jsonl")
