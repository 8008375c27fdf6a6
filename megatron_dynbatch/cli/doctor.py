"""``megatron-dynbatch doctor``: does the plugin fit what is installed and what will be run?"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import io
import json
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path

from megatron_dynbatch.cli.console import styled
from megatron_dynbatch.cli.environment import Check, environment
from megatron_dynbatch.errors import OptionError
from megatron_dynbatch.rollouts import RolloutDataError, RolloutDirectory

DESCRIPTION = """\
Shows versions, every place of Megatron that the plugin hooks into, and who else changed it. With
the arguments of a training after --, also what would be refused. Exit code 1 if there is a problem.
"""
EXAMPLES = """\
  megatron-dynbatch doctor
  megatron-dynbatch doctor --cpu --import other_plugin
  megatron-dynbatch doctor -- --dynamic-global-batch --rollout-path DIR --rollouts-per-step 64 \\
      --max-tokens-per-gpu 8192 --attention-dropout 0 --hidden-dropout 0 --num-experts 8"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of the subcommand."""
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--cpu", action="store_true", help="as under megatron_dynbatch.run --cpu")
    parser.add_argument(
        "--import", dest="imports", action="append", default=[], metavar="MODULE",
        help="import another plugin first, to see what it changes",
    )
    parser.add_argument(
        "arguments", nargs="*", metavar="-- ARGUMENTS", help="arguments of the pretrain script"
    )


def run(args: argparse.Namespace) -> int:
    """Look at everything and print it."""
    with warnings.catch_warnings(), contextlib.redirect_stdout(sys.stderr):
        warnings.simplefilter("ignore")  # Megatron warns of every optional package
        report = examine(args.arguments, args.cpu, args.imports)
    problems = [check.problem for checks in report.values() for check in checks if check.problem]
    if args.json:
        sections = {
            title: [{"name": c.name, "found": c.found, "problem": c.problem} for c in checks]
            for title, checks in report.items()
        }
        print(json.dumps({**sections, "ok": not problems}, indent=2))
    else:
        print(as_text(report, problems))
    return 1 if problems else 0


def examine(
    arguments: Sequence[str] = (), cpu: bool = False, imports: Sequence[str] = ()
) -> dict[str, list[Check]]:
    """All sections of the report, by title.

    Args:
        arguments: Of a training that is about to be started.
        cpu: Whether it will run on the CPU.
        imports: Modules of other plugins to import first.
    """
    runner = [_cpu_runner()] if cpu else []
    report = {"environment": [*environment(), *runner]}
    if any(check.problem for check in report["environment"]):
        return report  # hooks in half a Megatron say nothing
    for module in imports:
        _import(module)
    report["sites"] = sites()
    report["seams"] = seams()
    if arguments:
        report["command line"] = command_line(arguments)
    return report


def _cpu_runner() -> Check:
    try:
        from megatron_dynbatch.cpu import enable

        enable()
    except (ImportError, ValueError) as error:
        return Check("CPU runner", "cannot run", str(error))
    return Check("CPU runner", "ready")


def _import(module: str) -> None:
    try:
        importlib.import_module(module)
    except ImportError as error:
        raise ValueError(f"--import {module}: {error}") from None


def sites() -> list[Check]:
    """Every named site: file, lines, state."""
    from megatron_dynbatch.hooks.registry import SITES
    from megatron_dynbatch.hooks.sites import inspect_sites

    checks = []
    for report in inspect_sites(SITES):
        place = f"{report.file}:{','.join(map(str, report.lines))}"
        state = "in the source" if report.patched else "matched"
        if report.wrapped_by:
            state += f", wrapped by {report.wrapped_by}"
        if report.problem:
            advice = f"{report.site.name}: {report.problem}; see docs/compatibility.md"
            checks.append(Check(report.site.name, place, advice))
        else:
            checks.append(Check(report.site.name, f"{state}; {place}"))
    return checks


def seams() -> list[Check]:
    """Every seam: the function in place, and who put it there."""
    from megatron_dynbatch.hooks.registry import present_seams
    from megatron_dynbatch.hooks.seams import inspect_seams

    checks = []
    for report in inspect_seams(present_seams()):
        state = "in the source" if report.patched else "matched"
        if report.wrapped_by:
            state += f", wrapped by {report.wrapped_by}"
        checks.append(Check(report.seam.attribute, f"{state}; {report.where}", report.problem))
    return checks


def command_line(arguments: Sequence[str]) -> list[Check]:
    """What would be refused with these arguments; options of the script itself are passed over."""
    from megatron_dynbatch.hooks import SiteError, install
    from megatron_dynbatch.hooks.admission import refused

    try:
        install()
        args = _parse(arguments)
    except (SiteError, ValueError) as error:
        return [Check("arguments", "not accepted", str(error))]
    if not args.dynamic_global_batch:
        return [Check("--dynamic-global-batch", "not given: the plugin changes nothing")]
    path = rollout_path(args.rollout_path, getattr(args, "wait_for_path", False))
    try:
        sentences = refused(args)
    except OptionError as error:
        return [Check("arguments", "not accepted", str(error))]
    problems = [Check(sentence.partition(":")[0], "refused", sentence) for sentence in sentences]
    nothing = [] if problems else [Check("--dynamic-global-batch", "nothing is refused")]
    return [*nothing, *_traits(args), *problems, path]


def _traits(args: argparse.Namespace) -> list[Check]:
    """What the arguments have of the table of traits, and what proves it; then pairs."""
    from megatron_dynbatch.hooks.admission import Verdict, shown, verdicts
    from megatron_dynbatch.hooks.traits import BY_NAME, LATER

    single: list[Check] = []
    pairs: list[Verdict] = []
    for verdict in verdicts(args):
        trait = BY_NAME.get(verdict.name)
        if trait is None:
            pairs.append(verdict)
            continue
        proof = verdict.row or "no row"
        since = f"; megatron-core {shown(trait.since)} and newer" if verdict.row else ""
        single.append(Check(trait.name, f"{trait.kind}; {proof}{since}"))
    proved = sum(bool(pair.row) for pair in pairs)
    later = [Check(t.name, f"{t.kind}; looked at in the first step: {t.flag}") for t in LATER]
    unproven = [Check(pair.name, f"pair; {pair.caveat}") for pair in pairs if not pair.row]
    counted = Check("pairs", f"{proved} of {len(pairs)} have a row in docs/parity.md")
    return [*single, *later, counted, *unproven]


def rollout_path(text: str, may_come: bool = False) -> Check:
    """What is at --rollout-path.

    Args:
        text: The path.
        may_come: Whether training waits for a directory that is not there.
    """
    name = "--rollout-path"
    if text.startswith("queue:"):
        return Check(name, f"{text}: a queue of the training's own process")
    if text.startswith("ray://"):
        return Check(name, f"{text}: not looked into")
    folder = Path(text)
    if not folder.is_dir():
        what = "is a file" if folder.exists() else "there is no such directory"
        advice = f"{name} {text}: {what} (seen from {Path.cwd()}); is it the writer's?"
        return Check(name, f"{text}: {what}", None if may_come and not folder.exists() else advice)
    try:
        found = RolloutDirectory(folder, open_timeout=0.0).state(0)
    except RolloutDataError as error:
        return Check(name, f"{text}: cannot be used", f"{name} {error}")
    words = {
        "present": "batches are there",
        "absent": "no batch is there yet",
        "end": "closed without a batch",
    }
    return Check(name, f"{text}: {words[found]}")


def _parse(arguments: Sequence[str]) -> argparse.Namespace:
    """Parse with Megatron's own parser.

    Raises:
        ValueError: Its message, where the parser would end the process.
    """
    from megatron.training import arguments as megatron_arguments

    given, messages = sys.argv, io.StringIO()
    sys.argv = ["pretrain", *arguments]
    try:
        with contextlib.redirect_stderr(messages):
            return megatron_arguments.parse_args(ignore_unknown_args=True)
    except SystemExit:
        raise ValueError(messages.getvalue().strip().rpartition("error: ")[2]) from None
    finally:
        sys.argv = given


def as_text(report: dict[str, list[Check]], problems: Sequence[str | None]) -> str:
    """The report for people."""
    width = max(len(check.name) for checks in report.values() for check in checks)
    lines = []
    for title, checks in report.items():
        lines += [title, *(_line(check, width) for check in checks), ""]
    lines.append(f"{len(problems)} problem{'' if len(problems) == 1 else 's'}")
    lines += [f"  {number}. {problem}" for number, problem in enumerate(problems, 1)]
    return "\n".join(lines)


def _line(check: Check, width: int) -> str:
    mark = styled("!!", "bold red") if check.problem else styled("ok", "green")
    return f"  {mark}  {check.name:<{width}}  {check.found}"
