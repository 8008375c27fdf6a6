"""Real torchrun, in the forms in which it is used."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import tempfile
import uuid
from collections.abc import Mapping

import psutil

from tests.pool import ROOT

JOB = "DYNBATCH_TEST_JOB"
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
    job = uuid.uuid4().hex
    given = {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), JOB: job, **(environment or {})}
    words = [
        sys.executable, "-W", "ignore", "-m", "torch.distributed.run", *flags[form],
        "--nproc-per-node", str(ranks), "--max-restarts", str(restarts), *map(str, command),
    ]  # fmt: skip
    # Not pipes: a process that a killed rank had started would keep them open.
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
        try:
            done = subprocess.run(
                words, env={**os.environ, **given}, cwd=ROOT, stdout=out, stderr=err, timeout=900
            )
        finally:
            _end(job)
        texts = [file.seek(0) or file.read() for file in (out, err)]
    return subprocess.CompletedProcess(words, done.returncode, *texts)


def _end(job: str) -> None:
    """End what ranks that were killed have left: Megatron's writers of checkpoints live on."""
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.environ().get(JOB) == job:
                process.kill()
