"""What is measured: typed metrics, how they add up, what a step reports, where it is written.

Without torch only step reports are there; metrics hold tensors.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from megatron_dynbatch._lazy import names_from
from megatron_dynbatch.report.step_report import StepReport, StepReportWriter, read_step_reports

try:
    from megatron_dynbatch.report.metric import Metric, merge
    from megatron_dynbatch.report.over_ranks import reduce_over_ranks
    from megatron_dynbatch.report.rollout_report import rollout_report, token_metrics
except ModuleNotFoundError as error:
    if error.name != "torch":
        raise

if TYPE_CHECKING:
    from megatron_dynbatch.integrations.metrics import (
        gather_and_reduce_log_dict,
        gather_log_data,
        reduce_train_step_metrics,
        rollout_log_metric_contribution,
    )

__all__ = [
    "Metric",
    "StepReport",
    "StepReportWriter",
    "gather_and_reduce_log_dict",
    "gather_log_data",
    "merge",
    "read_step_reports",
    "reduce_over_ranks",
    "reduce_train_step_metrics",
    "rollout_log_metric_contribution",
    "rollout_report",
    "token_metrics",
]

_TRAINER_NAMES = (
    "gather_and_reduce_log_dict",
    "gather_log_data",
    "reduce_train_step_metrics",
    "rollout_log_metric_contribution",
)
_elsewhere = names_from(dict.fromkeys(_TRAINER_NAMES, "integrations.metrics"), __name__)


def __getattr__(name: str) -> Any:
    if name in __all__:
        import megatron_dynbatch._torch  # noqa: F401  raises where torch is not installed

    return _elsewhere(name)
