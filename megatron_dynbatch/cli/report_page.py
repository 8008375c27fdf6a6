"""One HTML file about a run: no script, no other file, nothing from the network."""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path

from megatron_dynbatch.report import StepReport

_PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>{title}</title>
<meta name="viewport" content="width=device-width, initial-scale=1">
<style>
body {{ font: 15px/1.5 system-ui, sans-serif; color: #222; background: white; max-width: 62rem;
  margin: 2rem auto; padding: 0 1rem; }}
h1 {{ font-size: 1.5rem; margin-bottom: 0; line-height: 1.25; }}
h2 {{ font-size: 1.1rem; margin-top: 2.2rem; }}
img {{ max-width: 100%; height: auto; }} .sub {{ color: #555; margin-top: .2rem;
  overflow-wrap: anywhere; }}
.figures {{ display: grid; grid-template-columns: repeat(auto-fit, minmax(9.5rem, 1fr));
  gap: 1rem 1.5rem; margin: 1.4rem 0; }}
.figures b {{ display: block; font-size: 1.5rem; line-height: 1.3; color: #1f5fa8; }}
.figures div {{ color: #555; font-size: 13px; }}
table {{ border-collapse: collapse; font-variant-numeric: tabular-nums; font-size: 13px; }}
th, td {{ text-align: right; padding: .15rem .6rem; white-space: nowrap; }}
th {{ border-bottom: 1px solid #999; position: sticky; top: 0; background: white; }}
tr:nth-child(even) td {{ background: #f6f8fb; }} li {{ margin: .3rem 0; }}
.steps {{ max-height: 30rem; overflow: auto; }}
</style></head><body>
<h1>{title}</h1>
<p class="sub">{subtitle}</p>
<div class="figures">{figures}</div>
{sections}
<h2>{table_title}</h2>
<div class="steps" tabindex="0"><table>
<tr>{headings}</tr>
{rows}
</table></div>
</body></html>
"""

COLUMNS = {
    "iteration": ("step", "{}"),
    "batch_id": ("batch", "{}"),
    "step_global_batch_size": ("rollouts", "{}"),
    "num_samples": ("samples", "{}"),
    "num_microbatches": ("micro-batches", "{}"),
    "fewest_microbatches": ("fewest possible", "{}"),
    "num_dummies": ("dummies", "{}"),
    "num_tokens": ("tokens", "{:,}"),
    "fill": ("fill", "{:.0%}"),
    "balance": ("balance", "{:.3f}"),
    "grad_norm": ("grad norm", "{:.3g}"),
    "learning_rate": ("learning rate", "{:.2e}"),
    "step_time": ("seconds", "{:.2f}"),
    "wait_time": ("waited", "{:.2f}"),
}
"""Columns of the table of steps; metrics of the loss follow."""

_NUM_METRICS = 6


def section(
    heading: str,
    *,
    text: str = "",
    png: Path | None = None,
    alt: str = "",
    points: Sequence[str] = (),
) -> str:
    """A part of the page.

    Args:
        heading: Its title.
        text: A paragraph.
        png: A picture, which goes into the page.
        alt: What it shows, for those who do not see it.
        points: Lines of a list.
    """
    parts = [f"<h2>{escape(heading)}</h2>"] if heading else []
    if text:
        parts.append(f"<p>{escape(text)}</p>")
    if png is not None:
        data = base64.b64encode(png.read_bytes()).decode()
        parts.append(f'<img alt="{escape(alt)}" src="data:image/png;base64,{data}">')
    if points:
        parts.append("<ul>" + "".join(f"<li>{escape(point)}</li>" for point in points) + "</ul>")
    return "\n".join(parts)


def write_page(
    path: Path,
    *,
    title: str,
    subtitle: str,
    figures: Mapping[str, str],
    sections: Sequence[str],
    reports: Sequence[StepReport],
    rewards: Mapping[int, float],
    table_title: str = "All steps",
) -> None:
    """Write the page.

    Args:
        path: HTML file.
        title: Of the page.
        subtitle: What ran.
        figures: What is counted → its number, for the top.
        sections: From `section`, in order.
        reports: Rows of the table.
        rewards: Batch → mean reward, for a column of the table.
        table_title: Its heading.
    """
    metrics = list(dict.fromkeys(name for report in reports for name in report.metrics))
    metrics = metrics[:_NUM_METRICS]
    headings = [heading for heading, _ in COLUMNS.values()] + ["reward"] * bool(rewards) + metrics
    page = _PAGE.format(
        title=escape(title),
        subtitle=escape(subtitle),
        figures="".join(f"<div><b>{escape(v)}</b>{escape(k)}</div>" for k, v in figures.items()),
        sections="\n".join(sections),
        table_title=escape(table_title),
        headings="".join(f"<th>{escape(heading)}</th>" for heading in headings),
        rows="\n".join(_row(report, metrics, rewards) for report in reports),
    )
    path.write_text(page, encoding="utf-8")


def _row(report: StepReport, metrics: Sequence[str], rewards: Mapping[int, float]) -> str:
    cells = [_cell(getattr(report, name), form) for name, (_, form) in COLUMNS.items()]
    if rewards:
        cells.append(_cell(rewards.get(report.batch_id), "{:.3f}"))
    cells += [_cell(report.metrics.get(name), "{:.4g}") for name in metrics]
    return "<tr>" + "".join(f"<td>{cell}</td>" for cell in cells) + "</tr>"


def _cell(value: object, form: str) -> str:
    return "" if value is None else form.format(value)
