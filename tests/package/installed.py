"""The wheel of this checkout in an environment of its own; torch and the rest are shared."""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
import tempfile
import venv
import zipfile
from pathlib import Path

from tests.pool import ROOT

_SCRIPT = """#!{python}
import sys
from {module} import main
if __name__ == "__main__":
    sys.exit(main())
"""
_COMMANDS = {
    "megatron-dynbatch": "megatron_dynbatch.cli.main",
    "torchrun": "torch.distributed.run",
}


def build_wheel(folder: Path) -> Path:
    """Build the wheel, without compiled kernels; the checkout is left as it is."""
    environment = {**os.environ, "MEGATRON_DYNBATCH_CUBINS": "0"}
    environment.pop("PYTHONPATH", None)
    with tempfile.TemporaryDirectory() as scratch:
        source = Path(scratch) / "source"
        files = subprocess.run(
            ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
            cwd=ROOT, capture_output=True, check=True,
        ).stdout.decode().split("\0")  # fmt: skip
        for name in filter(None, files):
            if (ROOT / name).is_file():
                (source / name).parent.mkdir(parents=True, exist_ok=True)
                (source / name).write_bytes((ROOT / name).read_bytes())
        subprocess.run(
            [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(folder),
             str(source)],
            env=environment, stdout=subprocess.DEVNULL, check=True,
        )  # fmt: skip
    (wheel,) = folder.glob("*.whl")
    return wheel


def install(wheel: Path, folder: Path) -> dict[str, str]:
    """Install a wheel over what this environment has.

    Returns:
        Variables of a process that finds its commands, and nothing of the checkout.
    """
    venv.create(folder)
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    site = folder / "lib" / version / "site-packages"
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(site)
    # After the wheel's own files, so an editable install there is not seen.
    (site / "shared.pth").write_text(sysconfig.get_paths()["purelib"] + "\n")
    for name, module in _COMMANDS.items():
        script = folder / "bin" / name
        script.write_text(_SCRIPT.format(python=folder / "bin" / "python", module=module))
        script.chmod(0o755)
    environment = {name: text for name, text in os.environ.items() if name != "PYTHONPATH"}
    path = os.pathsep.join([str(folder / "bin"), environment.get("PATH", "")])
    return {**environment, "PATH": path, "OMP_NUM_THREADS": "1", "NO_COLOR": "1"}
