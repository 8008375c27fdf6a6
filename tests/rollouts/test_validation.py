"""Each kind of fault is named with its row and field; masked values are no faults."""

from typing import Any

import pytest

from megatron_dynbatch.rollouts import (
    PER_TOKEN_FIELDS,
    RolloutBatch,
    RolloutDataError,
    Sample,
    validate_samples,
)
from tests.rollouts.helpers import golden_samples, random_samples

NAN, INF = float("nan"), float("inf")


def faults_of(samples: list[Sample], **options: Any) -> tuple[str, ...]:
    with pytest.raises(RolloutDataError) as caught:
        validate_samples(samples, **options)
    return caught.value.faults


def test_good_samples_pass() -> None:
    validate_samples(golden_samples(), vocab_size=100)
    validate_samples(random_samples(50, seed=1), vocab_size=1000)


def test_no_rollouts() -> None:
    with pytest.raises(RolloutDataError, match="no rollouts; give at least one sample"):
        validate_samples([])


@pytest.mark.parametrize(
    ("sample", "start"),
    [
        (Sample([], loss_mask=[], rollout_id=7), "row 1 (rollout 7), tokens: there are none"),
        (Sample([1, 2], loss_mask=[0, 1, 1]), "row 1, loss_mask: response and mask have 3 tokens"),
        (Sample([1, 2], 3), "row 1, loss_mask: response and mask have 3 tokens, the whole"),
        (Sample([1, 2, 3], loss_mask=[1, 2]), "row 1, loss_mask: entry 1 is 2"),
        (Sample([1, 2], 2), "row 1, loss_mask: entry 0 is 1 but there is no prompt"),
        (Sample([1, -2, 3], 1), "row 1, tokens: id -2 at position 1 is negative"),
        (Sample([1, 2, 50], 1), "row 1, tokens: id 50 at position 2 is not below the vocabulary"),
        (Sample([1, 2], 1, rollout_id=-5), "row 1 (rollout -5), rollout_id: -5 is negative"),
        (Sample([1, 2], 1, group_id=-2), "row 1, group_id: -2 is negative"),
        (Sample([1, 2], 1, reward=NAN), "row 1, reward: nan is not finite"),
        (Sample([1, 2], 1, advantage=-INF), "row 1, advantage: -inf is not finite"),
    ],
)
def test_one_fault_of_one_row(sample: Sample, start: str) -> None:
    advantage = None if sample.advantage is None else 1.0
    faults = faults_of([Sample([1, 2], 1, advantage=advantage), sample], vocab_size=50)
    assert len(faults) == 1
    assert faults[0].startswith(start)


@pytest.mark.parametrize("name", ["advantage", *PER_TOKEN_FIELDS])
def test_per_token_fields(name: str) -> None:
    def sample(values: list[float]) -> Sample:
        return Sample([1, 2, 3], loss_mask=[0, 1], **{name: values})  # type: ignore[arg-type]

    validate_samples([sample([NAN, 1.0]), sample([INF, 1.0])])
    assert faults_of([sample([1.0])]) == (
        f"row 0, {name}: 1 values for a response of 2 tokens; give one per response token",
    )
    assert faults_of([sample([0.0, NAN])]) == (
        f"row 0, {name}: entry 1 is nan at a trained position",
    )
    assert faults_of([sample([0.0, INF])])
    assert faults_of([sample([0.0, 1e300])])  # infinite in float32


def test_only_the_reference_policy_may_forbid_a_token() -> None:
    validate_samples([Sample([1, 2], 1, ref_log_probs=[-INF])])
    assert faults_of([Sample([1, 2], 1, log_probs=[-INF])])
    assert faults_of([Sample([1, 2], 1, rollout_log_probs=[-INF])])


def test_a_fully_masked_sample_may_have_any_values() -> None:
    validate_samples([Sample([1, 2], loss_mask=[0], reward=NAN, advantage=INF, values=[NAN])])


def test_the_first_token_may_be_a_masked_response_token() -> None:
    validate_samples([Sample([1, 2], loss_mask=[0, 1]), Sample([1], 0)])


def test_mixed_group_ids_inside_a_rollout() -> None:
    samples = [Sample([1, 2], 1, rollout_id=3, group_id=g) for g in (1, 1, 2, None)]
    faults = faults_of(samples)
    assert [fault.split(",")[0] for fault in faults] == ["row 2 (rollout 3)", "row 3 (rollout 3)"]
    assert "row 0 (rollout 3) of the same rollout has 1" in faults[0]
    validate_samples([Sample([1, 2], 1, group_id=g) for g in (1, 2)])  # absent ids: two rollouts


def test_a_field_of_only_some_trained_samples() -> None:
    masked = Sample([1, 2], loss_mask=[0])
    validate_samples([Sample([1, 2], 1, log_probs=[-1.0]), masked])
    faults = faults_of([Sample([1, 2], 1, log_probs=[-1.0]), masked, Sample([1, 2], 1)])
    assert len(faults) == 1
    assert faults[0].startswith("row 2, log_probs: absent, as in 1 of 2 samples")


def test_faults_are_collected_up_to_the_limit() -> None:
    samples = [Sample([], 0) for _ in range(5)]
    assert len(faults_of(samples)) == 5
    assert len(faults_of(samples, limit=5)) == 5
    with pytest.raises(RolloutDataError, match="row 1, tokens.*\n  … only the first 2") as caught:
        validate_samples(samples, limit=2)
    assert len(caught.value.faults) == 2
    assert "row 2" not in str(caught.value)


def test_rows_words_and_places_in_messages() -> None:
    samples = [Sample([1, 2], 1), Sample([1, -1], 1)]
    with pytest.raises(RolloutDataError, match="^a.jsonl: line 9, tokens: id -1"):
        validate_samples(samples, rows=[4, 9], where="a.jsonl", row_word="line")


def test_a_batch_is_validated_and_indexed() -> None:
    batch = RolloutBatch(iter(golden_samples()))
    assert len(batch) == 4 and batch[1].total_length == 6
    assert [s.mask_sum for s in batch] == [3, 1, 0, 2]
    assert batch.index.rollout_indices.tolist() == [0, 0, 1, 2]
    with pytest.raises(RolloutDataError, match="vocabulary size 10"):
        RolloutBatch(golden_samples(), vocab_size=10)
    with pytest.raises(RolloutDataError, match="here: no rollouts"):
        RolloutBatch([], where="here")
