"""Known vulnerabilities of everything that is installed beside the package, and of its extras.

    python -m tests.package.audit AUDITOR [--requirements FILE]

AUDITOR is a Python that has pip-audit. pip-audit itself ends with 0 where the advisory service
knows no version that it was asked about; here every pinned version must have been audited, or this
fails and says what was not.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

OWN = "megatron-dynbatch"
RUNTIME_EXTRAS = ("megatron", "te", "cuda", "ray", "plot", "progress", "completion")
SERVICES = ("pypi", "osv")


def normal(name: str) -> str:
    """A name as package indexes spell it."""
    return re.sub(r"[-_.]+", "-", name).lower()


def installed_pins() -> dict[str, str]:
    """Name → public version of everything installed here, but the package itself."""
    pins = {normal(d.name): d.version for d in importlib.metadata.distributions()}
    pins.pop(OWN, None)
    return {name: version.partition("+")[0] for name, version in sorted(pins.items())}


def missing_extras(pins: Mapping[str, str]) -> list[str]:
    """Requirements of the runtime extras that are not installed here."""
    requirements = importlib.metadata.requires(OWN) or []
    own = [r for r in requirements if any(f'extra == "{e}"' in r for e in RUNTIME_EXTRAS)]
    plain = [requirement.partition(";")[0].strip() for requirement in own]
    return [r for r in plain if normal(re.split(r"[\[<>=!~ ]", r)[0]) not in pins]


def newest_pins(requirements: Iterable[str]) -> dict[str, str]:
    """Name → version that pip would install now; nothing is installed."""
    pins: dict[str, str] = {}
    for requirement in requirements:
        command = ["install", "--quiet", "--dry-run", "--no-deps", "--only-binary", ":all:"]
        run = subprocess.run(
            [sys.executable, "-m", "pip", *command, "--report", "-", requirement],
            capture_output=True,
            text=True,
        )
        chosen = json.loads(run.stdout)["install"] if run.returncode == 0 else []
        name = normal(re.split(r"[\[<>=!~ ]", requirement)[0])
        pins[name] = chosen[0]["metadata"]["version"] if chosen else "unknown"
    return pins


def report_of(auditor: str, service: str, pins: Mapping[str, str]) -> dict[str, Any]:
    """What pip-audit says; no dependencies if it could not ask."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "requirements.txt"
        file.write_text("".join(f"{name}=={version}\n" for name, version in pins.items()))
        options = ["--no-deps", "--disable-pip", "--format", "json", "--progress-spinner", "off"]
        run = subprocess.run(
            [auditor, "-m", "pip_audit", "-s", service, "-r", str(file), *options],
            capture_output=True,
            text=True,
        )
    try:
        return json.loads(run.stdout)
    except ValueError:
        last = (run.stderr.strip().splitlines() or [f"ended with {run.returncode}"])[-1]
        print(f"pip-audit with {service} gave no report: {last[:200]}", file=sys.stderr)
        return {"dependencies": []}


def problems_of(report: Mapping[str, Any], pins: Mapping[str, str]) -> list[str]:
    """One sentence per vulnerability, and one on what was not audited; empty if all is well."""
    if not pins:
        return ["nothing was audited: the set of requirements is empty"]
    found = {normal(entry["name"]): entry for entry in report["dependencies"]}
    audited = [name for name in pins if name in found and "skip_reason" not in found[name]]
    problems = [
        f"{name} {pins[name]}: {entry['id']}, fixed in {', '.join(entry['fix_versions']) or '?'}"
        for name in audited
        for entry in found[name]["vulns"]
    ]
    if len(audited) < len(pins):
        rest = [f"{name} {version}" for name, version in pins.items() if name not in audited]
        problems.append(
            f"{len(audited)} of {len(pins)} versions were audited; the advisory service did not "
            f"answer for {', '.join(rest[:5])}{' and others' if len(rest) > 5 else ''}: run this "
            "where https://pypi.org/pypi/NAME/VERSION/json or https://api.osv.dev answers"
        )
    return problems


def main(argv: list[str] | None = None) -> int:
    """0 if every version was audited and none has a known vulnerability."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("auditor")
    parser.add_argument("--requirements", type=Path, help="NAME==VERSION lines instead")
    args = parser.parse_args(argv)
    if args.requirements is None:
        pins = installed_pins()
        pins |= newest_pins(missing_extras(pins))
    else:
        lines = args.requirements.read_text(encoding="utf-8").split()
        pins = {normal(line.partition("==")[0]): line.partition("==")[2] for line in lines}
    problems = ["nothing was asked"]
    for service in SERVICES:
        problems = problems_of(report_of(args.auditor, service, pins) if pins else {}, pins)
        if not problems or not pins:
            break
    for problem in problems:
        print(problem, file=sys.stderr)
    if not problems:
        print(f"{len(pins)} versions audited, no known vulnerability")
    return int(bool(problems))


if __name__ == "__main__":
    sys.exit(main())
