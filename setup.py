"""What pyproject.toml cannot say: compiled kernels, the examples in the wheel, the readme's links.

Without nvcc and NVRTC the package installs all the same: kernels are then compiled at first use on
a machine with a GPU, and everything else runs without them. MEGATRON_DYNBATCH_CUBINS=0 leaves them
out, which makes a build fast.
"""

import os
import re
import runpy
import shutil
import tomllib
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py

HERE = Path(__file__).parent
PACKAGE = Path("megatron_dynbatch")
REDUCE = PACKAGE / "reduce"
# As `megatron-dynbatch examples` looks for them.
EXAMPLES = PACKAGE / "share" / "examples"


class BuildAll(build_py):
    """Adds the kernels' cubins and the examples to the built package; not for editable installs."""

    def run(self) -> None:
        super().run()
        if self.editable_mode:
            return
        if os.environ.get("MEGATRON_DYNBATCH_CUBINS") != "0":
            # By path: the package itself may import what a build does not have.
            build = runpy.run_path(str(HERE / REDUCE / "build.py"))
            build["build_cubins"](Path(self.build_lib) / REDUCE / "cubins")
        target = Path(self.build_lib) / EXAMPLES
        shutil.rmtree(target, ignore_errors=True)
        no_bytecode = shutil.ignore_patterns("__pycache__")
        shutil.copytree(HERE / "examples", target, ignore=no_bytecode)


def repository() -> str | None:
    """Where the sources are, if pyproject.toml says so."""
    project = tomllib.loads((HERE / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    return project.get("urls", {}).get("Repository")


def readme(home: str | None) -> str:
    """README.md for an index, which shows it without the other files.

    Relative links lead into the repository; without one their texts are left, and no pictures.
    """
    version = runpy.run_path(str(HERE / PACKAGE / "_version.py"))["__version__"]

    def absolute(link: re.Match[str]) -> str:
        if home is None:
            return "" if link[1] else link[2]
        kind = "raw" if link[1] else "blob"
        return f"{link[1]}[{link[2]}]({home}/{kind}/v{version}/{link[3]})"

    text = (HERE / "README.md").read_text(encoding="utf-8")
    return re.sub(r"(!?)\[([^\]]*)\]\((?!https?:|#)([^)]+)\)", absolute, text)


setup(
    cmdclass={"build_py": BuildAll},
    long_description=readme(repository()),
    long_description_content_type="text/markdown",
)
