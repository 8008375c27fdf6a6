"""``python -m tests.browser.check_report [RUN_DIR]``: the report page in headless Chromium.

Makes the report of a run (a made-up one without RUN_DIR), opens it in three widths, and
checks there that every picture is drawn, that nothing is wider than the window and that nothing is
loaded from elsewhere. Screenshots are written to runs/report-check for people to look at. `make
report-check` runs it; it needs `chromium` (Debian's package) on PATH.
"""

from __future__ import annotations

import html
import json
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from megatron_dynbatch.cli.main import main as command
from tests.cli.run_folder import write_run
from tests.pool import ROOT

WIDTHS = (1280, 420, 390)
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
}), "*"))</script>"""


def browse(*arguments: str) -> str:
    """Run Chromium without a window; returns what it prints."""
    chromium = shutil.which("chromium") or shutil.which("chromium-browser")
    if chromium is None:
        raise SystemExit("chromium is not on PATH: install Debian's package `chromium`")
    with tempfile.TemporaryDirectory(prefix="chromium-") as profile:
        done = subprocess.run(
            [chromium, "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars",
             f"--user-data-dir={profile}", "--virtual-time-budget=10000", *arguments],
            capture_output=True, text=True, timeout=300,
        )  # fmt: skip
    return done.stdout


def look(page: Path, width: int, folder: Path) -> dict[str, Any]:
    """What the page is like at a width; leaves a screenshot of all of it."""
    probed = folder / "probed.html"
    probed.write_text(page.read_text(encoding="utf-8") + PROBE, encoding="utf-8")
    frame = folder / f"frame-{width}.html"
    frame.write_text(FRAME.format(page=probed.as_uri(), width=width, height=800))
    found = re.search(r'<pre id="found">(.*?)</pre>', browse("--dump-dom", frame.as_uri()))
    if found is None:
        raise SystemExit(f"{page} was not shown at {width} pixels")
    seen: dict[str, Any] = json.loads(html.unescape(found[1]))
    frame.write_text(FRAME.format(page=page.as_uri(), width=width, height=seen["height"]))
    shot = OUT / f"report-{width}.png"
    browse(f"--screenshot={shot}", f"--window-size={max(width, 500)},{seen['height']}",
           frame.as_uri())  # fmt: skip
    return seen


def problems(seen: dict[str, Any], width: int) -> list[str]:
    """What is wrong with the page at this width."""
    wrong = []
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
        if command(["report", str(run), "--out", str(OUT)]) != 0:
            return 1
        failed = False
        for width in WIDTHS:
            wrong = problems(look(OUT / "report.html", width, folder), width)
            failed |= bool(wrong)
            print(f"{width} pixels: {'; '.join(wrong) or 'as it should be'}")
    print(f"screenshots: {OUT}")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
