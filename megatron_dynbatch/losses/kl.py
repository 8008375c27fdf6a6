"""Estimators of KL(policy ‖ reference) from the log-probabilities of sampled tokens."""

from megatron_dynbatch.formulas import KlEstimator, kl_to_reference

__all__ = ["KlEstimator", "kl_to_reference"]
