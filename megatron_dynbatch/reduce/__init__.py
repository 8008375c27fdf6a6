"""Token weights and weighted sums: the arithmetic every loss and metric is built on."""

import megatron_dynbatch._torch  # noqa: F401
from megatron_dynbatch.reduce.exact import combine, limbs_to_float64
from megatron_dynbatch.reduce.policy_loss import (
    PolicyFormula,
    policy_loss_sample_sums,
    policy_loss_sums,
)
from megatron_dynbatch.reduce.sample_mean import get_sum_of_sample_mean
from megatron_dynbatch.reduce.segment_sums import segment_sums, token_weights
from megatron_dynbatch.reduce.segment_table import SegmentTable, segment_table
from megatron_dynbatch.reduce.weighted_sum import weighted_sum, weighted_sums

__all__ = [
    "PolicyFormula",
    "SegmentTable",
    "combine",
    "get_sum_of_sample_mean",
    "limbs_to_float64",
    "policy_loss_sample_sums",
    "policy_loss_sums",
    "segment_sums",
    "segment_table",
    "token_weights",
    "weighted_sum",
    "weighted_sums",
]
