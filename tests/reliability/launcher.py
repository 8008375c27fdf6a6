"""Real torchrun, in the forms in which it is used."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Mapping

from tests.pool import ROOT

FORMS = ("static", "standalone", "c10d")


def torchrun(
    form: str,
    *command: object,
    restarts: int = 0,
    ranks: int = 2,
    environment: Mapping[str, str] | None = None,
) -> subprocess.CompletedProcess[str]:
    """Run a command (a script, or -m and a module, with arguments) as ranks of one machine."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    flags = {
        "static": ["--master-port", str(port)],
        "standalone": ["--standalone"],
        "c10d": ["--rdzv-backend", "c10d", "--rdzv-endpoint", f"127.0.0.1:{port}"],
    }
    given = {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), **(environment or {})}
    return subprocess.run(
        [
            sys.executable, "-W", "ignore", "-m", "torch.distributed.run", *flags[form],
            "--nproc-per-node", str(ranks), "--max-restarts", str(restarts), *map(str, command),
        ],
        env={**os.environ, **given}, cwd=ROOT, capture_output=True, text=True, timeout=900,
    )  # fmt: skip
