"""One self-contained HTML page about a demo."""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

_PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>megatron-dynbatch demo</title>
<meta name="viewport" content="width=device-width, initial-scale=1">
<style>
body {{ font: 15px/1.5 system-ui, sans-serif; color: #222; max-width: 60rem; margin: 2rem auto;
  padding: 0 1rem; }}
h1 {{ font-size: 1.5rem; margin-bottom: 0; }} h2 {{ font-size: 1.1rem; margin-top: 2.2rem; }}
img {{ max-width: 100%; }} .sub {{ color: #666; margin-top: .2rem; }}
.figures {{ display: flex; gap: 2.5rem; flex-wrap: wrap; margin: 1.2rem 0; }}
.figures b {{ display: block; font-size: 1.6rem; color: #1f5fa8; }}
table {{ border-collapse: collapse; font-variant-numeric: tabular-nums; font-size: 13px; }}
th, td {{ text-align: right; padding: .15rem .6rem; }} th {{ border-bottom: 1px solid #999; }}
tr:nth-child(even) td {{ background: #f6f8fb; }} li {{ margin: .3rem 0; }}
.steps {{ max-height: 30rem; overflow: auto; }} .steps th {{ position: sticky; top: 0;
  background: white; }}
</style></head><body>
<h1>Reinforcement learning with a global batch per step</h1>
<p class="sub">{subtitle}</p>
<div class="figures">{figures}</div>
<img alt="reward, size and fill of the steps" src="{steps_png}">
<h2>The plan of one step</h2>
<p>Step {plan_step}. Samples of one rollout have one number; they may lie in different micro-batches
and on different ranks, and are still averaged as one rollout.</p>
<img alt="plan of a step" src="{plan_png}">
<h2>The same rollouts in a fixed global batch</h2>
<ul>{control}</ul>
<h2>All steps (seed {seed})</h2>
<div class="steps"><table><tr>{headings}</tr>
{rows}</table></div>
</body></html>
"""

_COLUMNS = {
    "iteration": ("step", "{}"),
    "reward": ("reward", "{:.3f}"),
    "G": ("rollouts", "{}"),
    "samples": ("samples", "{}"),
    "M": ("micro-batches", "{}"),
    "M_bound": ("needed", "{}"),
    "dummies": ("dummies", "{}"),
    "tokens": ("tokens", "{:,}"),
    "fill": ("fill", "{:.0%}"),
    "loss": ("loss", "{:.4f}"),
    "clip_fraction": ("clipped", "{:.1%}"),
    "kl": ("KL", "{:.4f}"),
    "grad_norm": ("grad norm", "{:.3f}"),
    "learning_rate": ("learning rate", "{:.2e}"),
}


def write_html(
    path: Path,
    *,
    subtitle: str,
    figures: Mapping[str, str],
    steps_png: Path,
    plan_png: Path,
    plan_step: int,
    control: Sequence[str],
    seed: int,
    rows: Sequence[Mapping[str, Any]],
) -> None:
    """Write the page, pictures inside.

    Args:
        path: Where to.
        subtitle: What ran.
        figures: What is counted → its number, for the top.
        steps_png: Picture of `charts.draw_steps`.
        plan_png: Picture of `charts.draw_plan`.
        plan_step: Step that it shows.
        control: Lines of `control.control_lines`.
        seed: Seed of the rows.
        rows: Rows of `results.step_rows`.
    """
    body = "\n".join(
        "<tr>" + "".join(f"<td>{f.format(r[name])}</td>" for name, (_, f) in _COLUMNS.items())
        + "</tr>"
        for r in rows
    )  # fmt: skip
    page = _PAGE.format(
        subtitle=escape(subtitle),
        figures="".join(f"<div><b>{escape(v)}</b>{escape(k)}</div>" for k, v in figures.items()),
        steps_png=_inline(steps_png),
        plan_png=_inline(plan_png),
        plan_step=plan_step,
        control="".join(f"<li>{escape(line)}</li>" for line in control),
        seed=seed,
        headings="".join(f"<th>{heading}</th>" for heading, _ in _COLUMNS.values()),
        rows=body,
    )
    path.write_text(page, encoding="utf-8")


def _inline(png: Path) -> str:
    return "data:image/png;base64," + base64.b64encode(png.read_bytes()).decode()
