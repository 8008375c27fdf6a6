"""Rollouts → steps → micro-batches on DP ranks. Needs NumPy only."""

from typing import TYPE_CHECKING

from megatron_dynbatch._lazy import names_from
from megatron_dynbatch.errors import PlanError
from megatron_dynbatch.geometry import ParallelLayout, padded_length, padded_micro_batch
from megatron_dynbatch.plan.cost import CostModel
from megatron_dynbatch.plan.list_form import Schedule
from megatron_dynbatch.plan.options import PlanOptions
from megatron_dynbatch.plan.packing.splitting import expand_bins_by_splitting
from megatron_dynbatch.plan.planner import make_plan
from megatron_dynbatch.plan.step_plan import StepPlan
from megatron_dynbatch.plan.types import Plan

if TYPE_CHECKING:
    from megatron_dynbatch.integrations.batch_size import compute_dynamic_global_batch_size
    from megatron_dynbatch.integrations.first_fit import first_fit_pack
    from megatron_dynbatch.integrations.schedule import build_dp_schedule

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

_HOME = {
    "build_dp_schedule": "integrations.schedule",
    "compute_dynamic_global_batch_size": "integrations.batch_size",
    "first_fit_pack": "integrations.first_fit",
}

__getattr__ = names_from(_HOME, __name__)
