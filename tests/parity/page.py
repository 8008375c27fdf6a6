"""docs/parity.md, written from what the tests of a whole run measured."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from importlib.metadata import version

Found = Mapping[str, float | str]
Results = Mapping[str, Sequence[tuple[str, Found]]]

INTRODUCTION = """\
# Parity: the same training for every layout and every packing

Written by `make parity`; every number here was measured by a test of `tests/parity/`, on the real
`megatron.training.pretrain` of megatron-core {megatron} with torch {torch}, on CPUs over gloo.

One set of rollouts is trained: uneven steps, 1 to 4 samples per rollout, neighbours of equal
lengths, samples without a prompt, advantages of both signs within a response, holes in the masks,
also where context parallelism cuts, and samples without any trained token. What is not finite
counts as infinitely far, a name that is missing on one side fails. Beside it runs an independent
loop (`tests/parity/reference.py`): one process, one sample at a time, no packing, no padding, no
micro-batches, none of this package's code, in float64. After every step the two are compared.

Each number is the largest deviation over all steps. `gradients` (before the optimizer) and
`parameters` (after it) are compared entry by entry for every parameter of the whole model, put
together from the ranks' shards, relative to the largest entry of that parameter; `metrics` are
what Megatron reports, the loss among them; `learning rate` and `weight decay` are those in use;
`consumed` is the difference between counts of rollouts. Megatron computes the gradient norm in
float32 whatever the weights are.
"""

TABLES = {
    "float64": """\
## Every layout, in float64

A script of one's own, variable width, loss from logits in float64: six steps of 8, 5, 12, 3, 9 and
8 rollouts. Bar: 1e-9.
""",
    "own loop": """\
## A loop of one's own

`megatron.core` and the plain functions, without `megatron.training` and without hooks. Bar: 1e-9.
""",
    "float32": """\
## An unmodified stock script, in float32

Flags only, fixed width, gradient clipping, AdamW; rounding grows over the steps. Bar: 1e-5.
""",
    "options": """\
## All pairs of options

A covering array: every two values of any two factors meet in some row. Factors: layout; how a step
is split into micro-batches (`dummies` adds more empty micro-batches than any plan has); reduction;
loss head (`logits` 2-tuple in float64; `megatron` 2-tuple and `stock` 3-tuple on Megatron's float32
cross entropy); per-token loss; distributed optimizer; overlapped gradient reduction; width; empty
rollouts counted or skipped. Steps of 8, 1 and 12 rollouts: the second has fewer samples than ranks.
Bars: 1e-9 for `logits`, 1e-6 for the other heads, 1e-5 with the distributed optimizer, which
takes no float64 (gradients 1e-4).
""",
    "distributed": """\
## The distributed optimizer

Optimizer states and gradients are sharded over ranks. Gradients are compared after a gathering of
all shards, before the update; with `--overlap-param-gather` (`gathered`) parameters are compared as
the next forward pass gathered them, in buckets of 4000 parameters. `two instances`:
`--num-distributed-optimizer-instances 2`. Megatron's distributed optimizer takes float32, bfloat16
and float16 parameters and no others, so these train in float32 beside the loop's float64. Steps of
8, 1 and 12 rollouts. Bars: 1e-5, and 1e-4 for gradients, which deviate by 2e-5 without the
distributed optimizer too.
""",
    "paths": """\
## Megatron's other paths

Float64 again, bar 1e-9.
""",
    "families": """\
## What people train, tiny

The architecture flags of each family. The reference is Megatron's own model run on every sample
alone and unpacked, in plain autograd, without hooks, schedule or parallelism
(`tests/parity/alone.py`): loss and every gradient of the first step. Bar: 1e-9.
""",
    "features": """\
## One property at a time

Against the same reference. Bar: 1e-9.
""",
    "pairs": """\
## Every two traits together

Trainings of `megatron_dynbatch/hooks/proven.py`, chosen so that every two
[traits](compatibility.md#what-is-proved) that can be together meet in one: those of a model and
those of a run. One step against the same reference; terms of routers are closed forms
(`tests/parity/reference_aux.py`). Bars: 1e-9; 1e-6 for the load-balancing loss over micro-batches,
whose counts stay in float32; 1e-5 with the distributed optimizer, which trains in float32, so it
proves no pair without one of its own flags.
""",
    "experts": """\
## Experts and auxiliary losses, against the independent loop

In float64, variable width; the loop has its own router, experts and MTP module, and closed forms
over the whole step (`tests/parity/reference_aux.py`). Megatron's router computes probabilities, and
MTP its cross entropy, in float32 whatever the model; here they stay in float64
(`tests/parity/float64.py`), so that nothing hides behind rounding. Bars: 1e-9, and 1e-6 for the
load-balancing loss, whose counts stay in float32; `between layouts` (gradients against those of the
first row of the same loss) 1e-9. `logged` is the auxiliary loss in Megatron's log, printed with
seven digits; `bias` the expert biases, which are float32.
""",
    "experts, float32 inside": """\
## The same with Megatron's float32 inside

A score is off by one rounding, 6e-8, now and then. Bar: 5e-6.
""",
    "spread": """\
## What the load-balancing loss owes to the packing

By its definition it is a product of means over a micro-batch, so it depends on which samples share
one, unless they route alike. How far the first step's loss and gradients (of all parameters,
language-model loss included; its coefficient is 1) lie from those of the whole step in one
micro-batch. z-loss, MTP and expert bias have no such spread.
""",
    "auxiliary": """\
## Auxiliary losses, against Megatron's own single pack

The whole step in one unpadded micro-batch on one rank is the yardstick; float32, unmodified script.
Deviations of loss and gradient norm, of the logged auxiliary loss, and of expert biases. The
load-balancing loss runs with routers that treat all tokens alike, so that packings have equal
routing frequencies.
""",
    "mutations": """\
## What a broken factor looks like

Each row breaks one factor of the arithmetic; the comparison must fail, and says where.
""",
}


def page(results: Results) -> str:
    """The whole page as Markdown."""
    parts = [INTRODUCTION.format(megatron=version("megatron-core"), torch=version("torch"))]
    for name, text in TABLES.items():
        if results.get(name):
            parts += [text, table(results[name])]
    return "\n".join(parts)


def heading(name: str) -> str:
    """By which a table is found: its text may be newer than the page."""
    return TABLES[name].partition("\n")[0] + "\n"


def added(old: str, results: Results) -> str:
    """The page with these rows in place of those of the same name, or after the table's others."""
    for name, rows in results.items():
        title = heading(name)
        if title not in old:
            names = list(TABLES)
            later = (heading(other) for other in names[names.index(name) + 1 :])
            place = next((other for other in later if other in old), None)
            where = len(old) if place is None else old.index(place)
            old = old[:where] + TABLES[name] + "\n" + table(rows) + "\n" + old[where:]
            continue
        start = old.index("| | ", old.index(title))
        end = old.find("\n\n", start)
        end = len(old) if end < 0 else end + 1
        merged = dict(_read(old[start:end])) | {row: _texts(found) for row, found in rows}
        old = old[:start] + table(list(merged.items())) + old[end:]
    return old


def _read(text: str) -> list[tuple[str, Found]]:
    """The rows of a table as it was written."""
    lines = [
        [cell.replace("\\|", "|") for cell in re.split(r" ?(?<!\\)\| ?", line)[1:-1]]
        for line in text.strip().splitlines()
    ]
    return [
        (row[0], {c: v for c, v in zip(lines[0][1:], row[1:], strict=True) if v})
        for row in lines[2:]
    ]


def _texts(found: Found) -> Found:
    return {quantity: _shown(value).replace("\\|", "|") for quantity, value in found.items()}


def table(rows: Sequence[tuple[str, Found]]) -> str:
    """One row per cell, one column per quantity; a blank where a cell has not measured it."""
    columns = list(dict.fromkeys(quantity for _, found in rows for quantity in found))
    lines = ["| | " + " | ".join(columns) + " |", "|---" * (len(columns) + 1) + "|"]
    for name, found in rows:
        values = [_shown(found.get(column, "")) for column in columns]
        lines.append(f"| {_shown(name)} | " + " | ".join(values) + " |")
    return "\n".join(lines) + "\n"


def _shown(value: float | str) -> str:
    if isinstance(value, str):
        return value.replace("|", "\\|")
    return "0" if value == 0 else f"{value:.0e}"
