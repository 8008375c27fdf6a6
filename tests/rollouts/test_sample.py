"""What the constructor of a sample makes of its arguments."""

import dataclasses
import pickle
import subprocess
import sys
from typing import Any

import numpy as np
import pytest
import torch

from megatron_dynbatch.rollouts import Sample
from tests.rollouts.helpers import assert_same_samples, golden_samples


def test_lengths_of_the_golden_fixture() -> None:
    samples = golden_samples()
    assert [s.total_length for s in samples] == [7, 6, 4, 3]
    assert [s.response_length for s in samples] == [4, 1, 2, 2]
    assert [s.mask_sum for s in samples] == [3, 1, 0, 2]


def test_response_length_alone_trains_the_whole_response() -> None:
    sample = Sample([5, 6, 7], response_length=2)
    assert sample.loss_mask.tolist() == [1, 1]
    assert sample.loss_mask.dtype == np.uint8
    assert sample.tokens.dtype == np.int64


def test_lists_arrays_and_tensors_are_the_same() -> None:
    lists = Sample([5, 6, 7], loss_mask=[0, 1], log_probs=[-1, -2], advantage=[0.5, 1], reward=2)
    arrays = Sample(
        np.array([5, 6, 7], np.int32),
        response_length=np.int64(2),
        loss_mask=np.array([False, True]),
        log_probs=np.array([-1.0, -2.0], np.float64),
        advantage=np.array([0.5, 1.0], np.float16),
        reward=np.float32(2),
    )
    tensors = Sample(
        torch.tensor([5, 6, 7]),
        loss_mask=torch.tensor([0.0, 1.0]),
        log_probs=torch.tensor([-1.0, -2.0]),
        advantage=torch.tensor([0.5, 1.0]),
        reward=torch.tensor(2.0),
    )
    assert_same_samples([arrays, tensors], [lists, lists])


def test_minus_one_is_an_absent_id() -> None:
    sample = Sample([1, 2], 1, rollout_id=-1, group_id=np.int64(-1))
    assert sample.rollout_id is None and sample.group_id is None


def test_one_advantage_is_a_float() -> None:
    assert Sample([1, 2], 1, advantage=3).advantage == 3.0
    assert isinstance(Sample([1, 2], 1, advantage=np.float64(3)).advantage, float)


def test_masked_values_keep_nan_and_infinity() -> None:
    values = Sample([1, 2, 3], loss_mask=[0, 0], values=[np.nan, -np.inf]).values
    np.testing.assert_array_equal(values, np.array([np.nan, -np.inf], np.float32))


def test_a_sample_is_frozen_and_survives_pickle_and_replace() -> None:
    sample = golden_samples()[0]
    with pytest.raises(dataclasses.FrozenInstanceError):
        sample.reward = 1.0  # type: ignore[misc]
    assert_same_samples([pickle.loads(pickle.dumps(sample))], [sample])
    replaced = dataclasses.replace(sample, reward=1.0)
    assert replaced.reward == 1.0
    assert replaced.loss_mask.tolist() == [1, 1, 0, 1]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({}, "give response_length or loss_mask"),
        ({"response_length": 2, "loss_mask": [1]}, "response_length is 2 but loss_mask has 1"),
        ({"response_length": -1}, "response_length is -1"),
        ({"response_length": 1.5}, "response_length is 1.5; give an integer"),
        ({"loss_mask": [0, 0.5]}, r"loss_mask\[1\] is 0.5; it must be 0 or 1"),
        ({"loss_mask": [-1]}, r"loss_mask\[0\] is -1"),
        ({"loss_mask": [np.nan]}, r"loss_mask\[0\] is nan"),
        ({"loss_mask": [[1]]}, "loss_mask has 2 dimensions"),
        ({"tokens": [1.0, 2.0], "response_length": 1}, "tokens holds float64"),
        ({"tokens": [2**70], "response_length": 1}, "tokens holds values that are not all"),
        ({"tokens": [[1], [2, 3]], "response_length": 1}, "tokens: "),
        ({"tokens": "abc", "response_length": 1}, "tokens holds <U3"),
        ({"response_length": 1, "rollout_id": "a"}, "rollout_id is 'a'; give an integer"),
        ({"response_length": 1, "group_id": 2**63}, "group_id is 9223372036854775808"),
        ({"response_length": 1, "reward": [1.0]}, "reward is"),
        ({"response_length": 1, "reward": "1"}, "reward is '1'"),
        ({"response_length": 1, "log_probs": ["1"]}, "log_probs holds"),
        ({"response_length": 1, "log_probs": [None]}, "log_probs holds"),
        ({"response_length": 1, "values": 1.0}, "values has 0 dimensions"),
    ],
)
def test_wrong_types_are_named(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Sample(**{"tokens": [1, 2], **arguments})


def test_the_package_needs_neither_torch_nor_megatron() -> None:
    code = (
        "import sys, megatron_dynbatch.rollouts; "
        "print(sorted({'torch', 'megatron'} & set(sys.modules)))"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "[]"
