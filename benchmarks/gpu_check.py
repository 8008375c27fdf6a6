"""Checks the kernels on the GPU of this machine, then measures them; one command, from a checkout.

    python benchmarks/gpu_check.py [--small] [--device cpu]

Prints what was checked and the tables, and writes both to benchmarks/results/<gpu>.md. The first
check that fails ends the run with its error. Needs torch, NumPy and cuda-bindings, no network; the
steps of pretrain need megatron-core and a column of the tables liger-kernel: where one is missing,
a line says so.
"""

import argparse
import shutil
import subprocess
import sys
import time
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks import gpu_pretrain, logprob_gpu
from benchmarks import reduce_gpu_checks as checks
from megatron_dynbatch.reduce import kernels

RESULTS = Path(__file__).parent / "results"


def run_checks(device: torch.device, small: bool) -> list[str]:
    """Runs every check; memory that nobody wrote reads as NaN meanwhile."""
    lines = []
    cuda = device.type == "cuda"
    torch.use_deterministic_algorithms(True, warn_only=True)
    for title, check in (
        ("batches of reductions", lambda: checks.check_reductions(device, small)),
        ("policy formulas: sums and gradients", lambda: checks.check_policy(device, small)),
        ("shapes of log-probs and entropy", lambda: logprob_gpu.check(device, small)),
        (
            "log-probs in a captured graph and without sync",
            lambda: logprob_gpu.check_graph_and_sync(device) if cuda else 0,
        ),
        ("runs with the same bits", lambda: checks.check_bits(device, 5 if small else 100)),
        ("replays of a captured graph", lambda: checks.check_graph(device) if cuda else 0),
        ("paths without a host-device sync", lambda: checks.check_no_sync(device) if cuda else 0),
    ):  # fmt: skip
        start = time.perf_counter()
        count = check()
        lines.append(f"* {count} {title} ({time.perf_counter() - start:.1f} s)")
        print(lines[-1], flush=True)
    torch.use_deterministic_algorithms(False)
    return lines


def run_sanitizers() -> list[str]:
    """This script's small checks once more under compute-sanitizer, where that is installed."""
    tool = shutil.which("compute-sanitizer")
    if tool is None:
        return ["* compute-sanitizer is not installed: memcheck and racecheck did not run"]
    lines = []
    for kind in ("memcheck", "racecheck"):
        command = [tool, "--tool", kind, "--error-exitcode", "9", sys.executable, __file__]
        try:
            result = subprocess.run(
                [*command, "--small"], capture_output=True, text=True, timeout=100, check=False
            )
        except subprocess.TimeoutExpired:
            lines.append(f"* compute-sanitizer {kind}: NOT FINISHED within 100 s")
            print(lines[-1], flush=True)
            continue
        if result.returncode:
            raise SystemExit(f"compute-sanitizer {kind} failed:\n{result.stdout[-4000:]}")
        lines.append(f"* compute-sanitizer {kind}: clean")
        print(lines[-1], flush=True)
    return lines


def environment(device: torch.device) -> list[str]:
    """What this ran on."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
    return [
        f"# Kernels on {name}",
        "",
        f"torch {torch.__version__}, CUDA {torch.version.cuda}. {kernels.status(device).reason}.",
        "",
    ]


def main() -> None:
    """Runs checks, sanitizers and measurements."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--small", action="store_true", help="few and small checks, no tables")
    parser.add_argument("--device", default="cuda", help="cpu: only checks this script itself")
    options = parser.parse_args()
    device = torch.device(options.device, 0 if options.device == "cuda" else None)
    if device.type == "cuda" and not torch.cuda.is_available():
        raise SystemExit("torch sees no GPU here; --device cpu checks the script alone")
    report = environment(device)
    print("\n".join(report), flush=True)
    if device.type == "cuda" and not kernels.status(device).active:
        raise SystemExit(kernels.status(device).reason)
    report += run_checks(device, options.small)
    if options.small:
        return
    report += gpu_pretrain.check(device.type)
    print(report[-1], flush=True)
    if device.type != "cuda":
        return
    report += run_sanitizers()
    from benchmarks import reduce_gpu_table as table

    rate = table.copy_rate(device)
    report += ["", f"Device-to-device copy in this run: {rate:.0f} GB/s.", ""]
    report += ["Reductions, forward and backward:", "", *table.reductions(device), ""]
    report += ["Policy loss, forward and backward:", "", *table.policy(device), ""]
    report += ["From logits, forward and backward:", "", *table.from_logits(device), ""]
    report += ["Log-prob and entropy from logits, forward and backward:", ""]
    report += logprob_gpu.table(device, rate)
    print("\n".join(report[-40:]))
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"{torch.cuda.get_device_name(device).replace(' ', '-')}.md"
    path.write_text("\n".join(report) + "\n")
    print(f"written to {path}")


if __name__ == "__main__":
    main()
