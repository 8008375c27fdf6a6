"""``python -m tests.browser.check_report [RUN_DIR]``: the report page in headless Chromium.

Makes the report of a run (a made-up one without RUN_DIR), opens it in four widths, light and dark,
and checks there that every picture is drawn, that nothing is wider than the window, that nothing is
loaded from elsewhere, and that text stands out from what is behind it. Screenshots are written to
runs/report-check for people to look at. `make report-check` runs it; it needs `chromium` (Debian's
package) on PATH.
"""

from __future__ import annotations

import html
import itertools
import json
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from megatron_dynbatch.cli.main import main as command
from megatron_dynbatch.report.identity import write_identity
from tests.cli.run_folder import LAYOUT, write_run
from tests.pool import ROOT

WIDTHS = (1400, 800, 420, 390)
SCHEMES = {"light": 1, "dark": 0}
"""What people prefer → its number among Blink's settings."""
LEAST_CONTRAST = 4.5
"""Of text, by WCAG 2 at level AA."""
OUT = ROOT / "runs" / "report-check"

# Chromium's windows are at least 500 pixels wide, so the page is shown in a frame.
FRAME = """<!doctype html><body style="margin:0">
<iframe src="{page}" style="border:0;width:{width}px;height:{height}px"></iframe>
<script>addEventListener("message", e => {{ const found = document.createElement("pre");
found.id = "found"; found.textContent = e.data; document.body.append(found); }})</script>"""
PROBE = """<script>addEventListener("load", () => parent.postMessage(JSON.stringify({
  width: innerWidth, content: document.documentElement.scrollWidth,
  height: document.documentElement.scrollHeight,
  pictures: [...document.images].map(i => [i.alt, i.naturalWidth, i.clientWidth]),
  loaded: performance.getEntriesByType("resource").map(e => e.name),
  rows: document.querySelectorAll("tr").length,
  dark: matchMedia("(prefers-color-scheme: dark)").matches,
  paper: getComputedStyle(document.body).backgroundColor,
  inks: [...document.querySelectorAll("h1, h2, p, b, div, dt, dd, th, td, li")].map(
    e => [e.tagName, getComputedStyle(e).color]),
}), "*"))</script>"""


def browse(scheme: str, *arguments: str) -> str:
    """Run Chromium without a window; returns what it prints."""
    chromium = shutil.which("chromium") or shutil.which("chromium-browser")
    if chromium is None:
        raise SystemExit("chromium is not on PATH: install Debian's package `chromium`")
    with tempfile.TemporaryDirectory(prefix="chromium-") as profile:
        done = subprocess.run(
            [chromium, "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars",
             f"--blink-settings=preferredColorScheme={SCHEMES[scheme]}",
             f"--user-data-dir={profile}", "--virtual-time-budget=10000", *arguments],
            capture_output=True, text=True, timeout=300,
        )  # fmt: skip
    return done.stdout


def look(page: Path, width: int, scheme: str, folder: Path) -> dict[str, Any]:
    """What the page is like at a width; leaves a screenshot of all of it."""
    probed = folder / "probed.html"
    probed.write_text(page.read_text(encoding="utf-8") + PROBE, encoding="utf-8")
    frame = folder / f"frame-{width}.html"
    frame.write_text(FRAME.format(page=probed.as_uri(), width=width, height=800))
    found = re.search(r'<pre id="found">(.*?)</pre>', browse(scheme, "--dump-dom", frame.as_uri()))
    if found is None:
        raise SystemExit(f"{page} was not shown at {width} pixels")
    seen: dict[str, Any] = json.loads(html.unescape(found[1]))
    frame.write_text(FRAME.format(page=page.as_uri(), width=width, height=seen["height"]))
    shot = OUT / f"report-{width}{'-dark' * (scheme == 'dark')}.png"
    browse(scheme, f"--screenshot={shot}", f"--window-size={max(width, 500)},{seen['height']}",
           frame.as_uri())  # fmt: skip
    return seen


def luminance(colour: str) -> float:
    """Relative luminance of a CSS colour, by WCAG 2."""
    parts = [int(part) / 255 for part in re.findall(r"\d+", colour)[:3]]
    red, green, blue = (
        part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts
    )
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def contrast(one: str, other: str) -> float:
    """Of two CSS colours, 1 to 21."""
    low, high = sorted((luminance(one), luminance(other)))
    return (high + 0.05) / (low + 0.05)


def problems(seen: dict[str, Any], width: int, scheme: str) -> list[str]:
    """What is wrong with the page at this width."""
    wrong = [
        f"{tag} is {ink} on {seen['paper']}"
        for tag, ink in sorted({tuple(pair) for pair in seen["inks"]})
        if contrast(ink, seen["paper"]) < LEAST_CONTRAST
    ]
    if seen["dark"] != (scheme == "dark") or (luminance(seen["paper"]) < 0.1) != seen["dark"]:
        wrong.append(f"the page is {seen['paper']} for who prefers {scheme}")
    if seen["width"] != width:
        wrong.append(f"the window is {seen['width']} pixels wide")
    if seen["content"] > width:
        wrong.append(f"the content is {seen['content']} pixels wide")
    if not seen["pictures"]:
        wrong.append("there is no picture")
    for alt, natural, shown in seen["pictures"]:
        if natural == 0 or not 0 < shown <= width:
            wrong.append(f"picture {alt!r} is {natural} pixels wide, shown on {shown}")
    wrong += [f"{name} is loaded" for name in seen["loaded"] if not name.startswith("data:")]
    if seen["rows"] < 2:
        wrong.append("the table of steps is empty")
    return wrong


def main() -> int:
    """Exit code 1 if something is wrong at some width."""
    OUT.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="report-check-") as name:
        folder = Path(name)
        if len(sys.argv) > 1:
            run = Path(sys.argv[1])
        else:
            run = folder / "run"
            run.mkdir()
            write_run(run, num_batches=60)
            args = SimpleNamespace(num_layers=32, hidden_size=4096, num_attention_heads=32)
            write_identity(run / "steps.jsonl", args, LAYOUT.to_dict())
        if command(["report", str(run), "--out", str(OUT)]) != 0:
            return 1
        failed = False
        for width, scheme in itertools.product(WIDTHS, SCHEMES):
            wrong = problems(look(OUT / "report.html", width, scheme, folder), width, scheme)
            failed |= bool(wrong)
            print(f"{width} pixels, {scheme}: {'; '.join(wrong) or 'as it should be'}", flush=True)
    print(f"screenshots: {OUT}")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
