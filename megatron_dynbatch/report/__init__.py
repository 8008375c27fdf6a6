"""What a step reports, and where it is written."""

from megatron_dynbatch.report.step_report import StepReport, StepReportWriter, read_step_reports

__all__ = ["StepReport", "StepReportWriter", "read_step_reports"]
