"""Rollouts → steps → micro-batches on DP ranks. Needs NumPy only."""

from megatron_dynbatch.plan.cost import CostModel
from megatron_dynbatch.plan.errors import PlanError
from megatron_dynbatch.plan.layout import ParallelLayout, padded_length, padded_micro_batch
from megatron_dynbatch.plan.options import PlanOptions
from megatron_dynbatch.plan.packing.splitting import expand_bins_by_splitting
from megatron_dynbatch.plan.planner import make_plan
from megatron_dynbatch.plan.schedule import Schedule, build_dp_schedule
from megatron_dynbatch.plan.simple import compute_dynamic_global_batch_size, first_fit_pack
from megatron_dynbatch.plan.types import Plan, StepPlan

__all__ = [
    "CostModel",
    "ParallelLayout",
    "Plan",
    "PlanError",
    "PlanOptions",
    "Schedule",
    "StepPlan",
    "build_dp_schedule",
    "compute_dynamic_global_batch_size",
    "expand_bins_by_splitting",
    "first_fit_pack",
    "make_plan",
    "padded_length",
    "padded_micro_batch",
]
