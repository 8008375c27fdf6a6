"""One HTML file about a run: no script, no other file, nothing from the network."""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path

from megatron_dynbatch.report import StepReport
from megatron_dynbatch.wording import counted

_PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>{title}</title>
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<style>
:root {{ --ink: #222; --soft: #555; --paper: white; --line: #999; --stripe: #f6f8fb;
  --number: #1f5fa8; }}
@media (prefers-color-scheme: dark) {{ :root {{ --ink: #ddd; --soft: #aaa; --paper: #1a1a1a;
  --line: #777; --stripe: #242628; --number: #7db4f0; }}
  img {{ filter: invert(.9) hue-rotate(180deg); }} }}
body {{ font: 15px/1.5 system-ui, sans-serif; color: var(--ink); background: var(--paper);
  max-width: 62rem; margin: 2rem auto; padding: 0 1rem; }}
h1 {{ font-size: 1.5rem; margin-bottom: 0; line-height: 1.25; overflow-wrap: anywhere; }}
h2 {{ font-size: 1.1rem; margin-top: 2.2rem; }}
img {{ max-width: 100%; height: auto; }} .sub {{ color: var(--soft); margin-top: .2rem;
  overflow-wrap: anywhere; }}
.figures {{ display: grid; grid-template-columns: repeat(auto-fit, minmax(9.5rem, 1fr));
  gap: 1rem 1.5rem; margin: 1.4rem 0; }}
.figures b {{ display: block; font-size: 1.5rem; line-height: 1.3; color: var(--number); }}
.figures div, .note {{ color: var(--soft); font-size: 13px; }}
dl {{ display: grid; grid-template-columns: max-content 1fr; gap: .2rem 1rem; font-size: 13px; }}
dt {{ color: var(--soft); }} dd {{ margin: 0; overflow-wrap: anywhere; }}
table {{ border-collapse: collapse; font-variant-numeric: tabular-nums; font-size: 13px; }}
th, td {{ text-align: right; padding: .15rem .6rem; white-space: nowrap; }}
th {{ border-bottom: 1px solid var(--line); position: sticky; top: 0; background: var(--paper); }}
td {{ background: var(--paper); }} tr:nth-child(even) td {{ background: var(--stripe); }}
th:first-child, td:first-child {{ position: sticky; left: 0; }} th:first-child {{ z-index: 1; }}
li {{ margin: .3rem 0; }}
.steps {{ max-height: 30rem; overflow: scroll; border: 1px solid var(--line); }}
@media (max-width: 600px) {{ body {{ margin: 1rem auto; padding: 0 .6rem; }}
  dl {{ grid-template-columns: 1fr; }} dd {{ margin-bottom: .4rem; }} }}
</style></head><body>
<h1>{title}</h1>
<p class="sub">{subtitle}</p>
<div class="figures">{figures}</div>
{sections}
<h2>{table_title}</h2>
<p class="note">{table_note}</p>
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
    narrow: Path | None = None,
    alt: str = "",
    points: Sequence[str] = (),
    pairs: Mapping[str, str] | None = None,
) -> str:
    """A part of the page.

    Args:
        heading: Its title.
        text: A paragraph.
        png: A picture, which goes into the page.
        narrow: The same for screens of at most 600 pixels.
        alt: What it shows, for those who do not see it.
        points: Lines of a list.
        pairs: Name → what it is, as a list of two columns.
    """
    parts = [f"<h2>{escape(heading)}</h2>"] if heading else []
    if text:
        parts.append(f"<p>{escape(text)}</p>")
    if png is not None:
        picture = f'<img alt="{escape(alt)}" src="{_data(png)}">'
        if narrow is not None:
            source = f'<source media="(max-width: 600px)" srcset="{_data(narrow)}">'
            picture = f"<picture>{source}{picture}</picture>"
        parts.append(picture)
    if points:
        parts.append("<ul>" + "".join(f"<li>{escape(point)}</li>" for point in points) + "</ul>")
    if pairs:
        rows = (f"<dt>{escape(k)}</dt><dd>{escape(v)}</dd>" for k, v in pairs.items())
        parts.append(f"<dl>{''.join(rows)}</dl>")
    return "\n".join(parts)


def _data(png: Path) -> str:
    return f"data:image/png;base64,{base64.b64encode(png.read_bytes()).decode()}"


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
    metrics, left_out = metrics[:_NUM_METRICS], metrics[_NUM_METRICS:]
    headings = [heading for heading, _ in COLUMNS.values()] + ["reward"] * bool(rewards) + metrics
    page = _PAGE.format(
        title=escape(title),
        subtitle=escape(subtitle),
        figures="".join(f"<div><b>{escape(v)}</b>{escape(k)}</div>" for k, v in figures.items()),
        sections="\n".join(sections),
        table_title=escape(table_title),
        table_note=escape(_note(len(reports), len(headings), left_out)),
        headings="".join(f"<th>{escape(heading)}</th>" for heading in headings),
        rows="\n".join(_row(report, metrics, rewards) for report in reports),
    )
    path.write_text(page, encoding="utf-8")


def _note(rows: int, columns: int, left_out: Sequence[str]) -> str:
    note = f"{counted(rows, 'row')} of {counted(columns, 'column')}: scroll down and to the right."
    if left_out:
        note += f" Not in the table, but in the step reports: {', '.join(left_out)}."
    return note


def _row(report: StepReport, metrics: Sequence[str], rewards: Mapping[int, float]) -> str:
    cells = [_cell(getattr(report, name), form) for name, (_, form) in COLUMNS.items()]
    if rewards:
        cells.append(_cell(rewards.get(report.batch_id), "{:.3f}"))
    cells += [_cell(report.metrics.get(name), "{:.4g}") for name in metrics]
    return "<tr>" + "".join(f"<td>{cell}</td>" for cell in cells) + "</tr>"


def _cell(value: object, form: str) -> str:
    return "" if value is None else form.format(value)
