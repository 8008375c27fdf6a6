"""``python -m tests.package.check [DIST]``: sdist and wheel, and the wheel in new environments.

Builds both from this checkout (or takes those in DIST), looks into them, checks what an index would
(`twine check --strict`), and installs the wheel in new environments: without extras, where there is
no torch, and with some. torch and what it needs are linked from the environment that runs this:
they are gigabytes. Everything else is installed as anybody would. `make package-check` runs it; it
needs the package index.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tarfile
import tempfile
import venv
import zipfile
from importlib.metadata import Distribution, distribution
from pathlib import Path

from megatron_dynbatch._version import __version__
from tests.pool import ROOT

EXTRAS = ("", "megatron,plot,progress,completion")
PLAN = ("plan", "--distribution", "C", "--num-samples", "64", "--dp", "2", "--json")
WITHOUT_TORCH = (
    "import sys; sys.modules['torch'] = sys.modules['megatron'] = None\n"
    "import megatron_dynbatch, megatron_dynbatch.plan, megatron_dynbatch.rollouts\n"
    "print(megatron_dynbatch.__version__)"
)


def run(*command: str | Path, expect: int = 0) -> str:
    """Run a command outside the checkout; returns what it prints.

    Raises:
        SystemExit: It ends with another code.
    """
    with tempfile.TemporaryDirectory() as folder:
        done = subprocess.run(
            list(map(str, command)), cwd=folder, env={"PATH": "/usr/bin:/bin", "HOME": folder},
            capture_output=True, text=True,
        )  # fmt: skip
    if done.returncode != expect:
        words = " ".join(map(str, command))
        raise SystemExit(f"{words}: exit code {done.returncode}\n{done.stdout}{done.stderr}")
    return done.stdout + done.stderr


def outside_environment() -> dict[str, str]:
    """Variables without PYTHONPATH: what it holds would count as installed."""
    return {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}


def build(out: Path) -> None:
    """Build sdist and wheel."""
    subprocess.run(
        [sys.executable, "-m", "build", "--outdir", str(out), str(ROOT)],
        check=True, stdout=subprocess.DEVNULL, env=outside_environment(),
    )  # fmt: skip


def look_inside(sdist: Path, wheel: Path) -> None:
    """Check what both contain.

    Raises:
        SystemExit: Something is missing, or is there that should not be.
    """
    names = zipfile.ZipFile(wheel).namelist()
    packages = {name.split("/")[0] for name in names}
    needed = {"megatron_dynbatch/py.typed", "megatron_dynbatch/reduce/csrc/kernels.cu"}
    shipped = tracked("examples")
    needed |= {f"megatron_dynbatch/share/{name}" for name in shipped}
    if missing := needed - set(names):
        raise SystemExit(f"the wheel lacks {', '.join(sorted(missing))}")
    if packages != {"megatron_dynbatch", f"megatron_dynbatch-{__version__}.dist-info"}:
        raise SystemExit(f"the wheel contains {', '.join(sorted(packages))}")
    with tarfile.open(sdist) as archive:
        held = {name.partition("/")[2] for name in archive.getnames()}
    if missing := tracked() - {".gitignore"} - held:
        raise SystemExit(f"the sdist lacks {', '.join(sorted(missing))}")
    cubins = [name for name in names if name.endswith(".cubin")]
    for path in (sdist, wheel):
        print(f"{path.name}: {path.stat().st_size / 1024:.0f} KiB")
    print(f"compiled kernels in the wheel: {len(cubins) or 'none (no nvcc here)'}")


def tracked(*folders: str) -> set[str]:
    """Files of the checkout that git knows, all or those in some folders."""
    done = subprocess.run(
        ["git", "ls-files", *folders], cwd=ROOT, capture_output=True, text=True, check=True
    )
    return set(done.stdout.split())


def link_torch(site: Path) -> None:
    """Link torch and everything it needs into an environment."""
    waiting, seen = ["torch"], set()
    while waiting:
        name = waiting.pop()
        if name in seen:
            continue
        seen.add(name)
        try:
            found: Distribution = distribution(name)
        except ModuleNotFoundError:  # needed under a condition that does not hold here
            continue
        for top in {Path(file.parts[0]) for file in found.files or () if file.parts[0] != ".."}:
            if top.name != "__pycache__" and not (site / top).exists():
                (site / top).symlink_to(Path(str(found.locate_file(top))))
        for requirement in found.requires or ():
            needed = re.split(r"[^A-Za-z0-9_.-]", requirement, maxsplit=1)[0]
            # torch asks for CUDA's parts as extras of one package.
            if "extra ==" not in requirement or needed.startswith("nvidia-"):
                waiting.append(needed)


def check_environment(wheel: Path, extras: str, folder: Path) -> None:
    """Install the wheel in a new environment and use it."""
    venv.create(folder, with_pip=True)
    python = folder / "bin" / "python"
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    if extras:
        link_torch(folder / "lib" / version / "site-packages")
    wanted = f"{wheel}[{extras}]" if extras else str(wheel)
    install = [python, "-m", "pip", "install", "--quiet", wanted]
    subprocess.run(install, check=True, env=outside_environment())
    run(python, "-m", "pip", "check")
    command = folder / "bin" / "megatron-dynbatch"
    found = {run(command, "--version").strip(), run(python, "-c", WITHOUT_TORCH).strip()}
    if found != {__version__}:
        raise SystemExit(f"versions differ: {found}, {__version__}")
    run(command, *PLAN)
    run(command, "examples", ".")
    if "plot" in extras:
        run(command, *PLAN, "--plot", folder / "plan.png")
        run(command, "doctor", "--cpu")
        run(command, "completion", "bash")
    else:
        said = run(command, "report", folder, expect=2)
        if "megatron-dynbatch[plot]" not in said or len(said.splitlines()) != 1:
            raise SystemExit(f"without matplotlib `report` said: {said}")
        said = run(command, "doctor", expect=1)
        if "megatron-dynbatch[torch]" not in said or "megatron-dynbatch[megatron]" not in said:
            raise SystemExit(f"without torch `doctor` said: {said}")
        said = run(command, "run", __file__, expect=2)
        if "megatron-dynbatch[torch]" not in said or "Traceback" in said:
            raise SystemExit(f"without torch `run` said: {said}")
    print(f"installed with extras {extras or 'none'}: pip check and commands pass")


def main() -> int:
    """Exit code 0 if everything holds."""
    with tempfile.TemporaryDirectory(prefix="package-check-") as name:
        folder = Path(name)
        dist = Path(sys.argv[1]).resolve() if len(sys.argv) > 1 else folder / "dist"
        if len(sys.argv) == 1:
            build(dist)
        (wheel,), (sdist,) = dist.glob("*.whl"), dist.glob("*.tar.gz")
        look_inside(sdist, wheel)
        check = [sys.executable, "-m", "twine", "check", "--strict", str(sdist), str(wheel)]
        subprocess.run(check, check=True)
        for number, extras in enumerate(EXTRAS):
            check_environment(wheel, extras, folder / f"environment-{number}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
