"""Adds the kernels' cubins to what pyproject.toml declares, where a CUDA compiler is at hand.

Without nvcc and NVRTC the package installs all the same: kernels are then compiled at first use on
a machine with a GPU, and everything else runs without them.
"""

import runpy
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py

REDUCE = Path("megatron_dynbatch/reduce")


class BuildWithCubins(build_py):
    """Compiles the kernels into the built package; not for editable installs."""

    def run(self) -> None:
        super().run()
        if not self.editable_mode:
            # By path: the package itself would import torch, which a build does not have.
            build = runpy.run_path(str(REDUCE / "build.py"))
            build["build_cubins"](Path(self.build_lib) / REDUCE / "cubins")


setup(cmdclass={"build_py": BuildWithCubins})
