"""Twenty steps of Megatron's real pretrain on one device, with the kernels and without them.

    python -m benchmarks.gpu_pretrain [--device cpu]

Called by `gpu_check.py`. A small GPT trains on rollouts with the policy loss, in bf16 on a GPU,
with the attention of `megatron_dynbatch.cpu` (Megatron's local one knows no packed sequences). The
run with kernels must follow the run on the torch implementation, and nothing in our loss path may
make the host wait for the GPU.
"""

import argparse
import importlib.util
import json
import math
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parent.parent
STEPS, ROLLOUTS_PER_STEP, WIDTH, VOCAB_SIZE = 20, 6, 512, 96
TIMEOUT = {"cuda": 100, "cpu": 600}  # seconds of one run
# Runs differ by rounding: bf16 layers, atomics in torch's own backward of the embedding.
FIRST_LOSS, LOSSES = 1e-3, 5e-2

FLAGS = [
    "--num-layers", "2", "--hidden-size", "128", "--num-attention-heads", "4",
    "--ffn-hidden-size", "256", "--normalization", "RMSNorm", "--swiglu", "--disable-bias-linear",
    "--position-embedding-type", "rope", "--max-position-embeddings", str(WIDTH),
    "--untie-embeddings-and-output-weights", "--attention-dropout", "0", "--hidden-dropout", "0",
    "--tokenizer-type", "NullTokenizer", "--vocab-size", str(VOCAB_SIZE), "--seed", "7",
    "--lr", "1e-3", "--lr-decay-style", "constant", "--train-iters", str(STEPS),
    "--eval-iters", "0", "--log-interval", "1", "--micro-batch-width", "variable",
    "--dynamic-global-batch", "--rollouts-per-step", str(ROLLOUTS_PER_STEP),
    "--max-tokens-per-gpu", str(WIDTH),
]  # fmt: skip

# Fused kernels that only Apex or Transformer Engine bring.
GPU_FLAGS = [
    "--bf16", "--transformer-impl", "local", "--no-gradient-accumulation-fusion",
    "--no-persist-layer-norm", "--no-masked-softmax-fusion", "--no-bias-dropout-fusion",
    "--no-bias-swiglu-fusion", "--no-rope-fusion", "--num-workers", "0",
]  # fmt: skip


def write_rollouts(directory: Path) -> None:
    """One batch for all steps: 1 to 3 samples a rollout, lengths and masks at random."""
    from megatron_dynbatch import RolloutDirectory, Sample

    draw = np.random.default_rng(0)
    samples = []
    for rollout in range(STEPS * ROLLOUTS_PER_STEP):
        advantage = float(draw.normal())
        for _ in range(draw.integers(1, 4)):
            tokens = draw.integers(0, VOCAB_SIZE, draw.integers(8, WIDTH // 2))
            mask = draw.random(draw.integers(1, len(tokens))) < 0.8
            old = draw.normal(-np.log(VOCAB_SIZE), 0.1, mask.size).astype(np.float32)
            samples.append(
                Sample(
                    tokens, loss_mask=mask, rollout_id=rollout, advantage=advantage,
                    log_probs=old, ref_log_probs=old,
                )
            )  # fmt: skip
    rollouts = RolloutDirectory(directory, vocab_size=VOCAB_SIZE)
    rollouts.write(samples)
    rollouts.finish()


def train(folder: Path, device: str, kernels: bool) -> tuple[list[float], list[str]]:
    """Losses of one run's steps, and the places in our loss path that made the host wait."""
    name = "kernels" if kernels else "torch"
    reports, waits = folder / f"{name}.jsonl", folder / f"{name}.waits"
    command = [sys.executable, "-m", "benchmarks.gpu_pretrain_script"]
    flags = [*FLAGS, *(GPU_FLAGS if device == "cuda" else [])]
    paths = ["--rollout-path", str(folder / "rollouts"), "--step-report", str(reports)]
    path = f"{ROOT}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"
    done = subprocess.run(
        [*command, *flags, *paths], capture_output=True, text=True, check=False, cwd=ROOT,
        timeout=TIMEOUT[device],
        env={
            **os.environ, "PYTHONPATH": path, "MEGATRON_DYNBATCH_KERNELS": str(int(kernels)),
            "CHECK_DEVICE": device, "CHECK_WAITS": str(waits),
        },
    )  # fmt: skip
    if done.returncode:
        raise RuntimeError(f"the run ({name}) failed:\n{done.stderr[-4000:]}")
    losses = [
        json.loads(line)["metrics"]["loss"] for line in reports.read_text().split("\n") if line
    ]
    return losses, waits.read_text().splitlines()


def check(device: str) -> list[str]:
    """Both runs, compared; lines of the report. Without megatron-core: a line that says so."""
    if not (importlib.util.find_spec("megatron") and importlib.util.find_spec("megatron.training")):
        return ["* megatron-core is not installed: the 20 steps of pretrain did not run"]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_rollouts(folder / "rollouts")
        (ours, waits), (reference, _) = (train(folder, device, k) for k in (True, False))
    assert len(ours) == len(reference) == STEPS, f"{len(ours)} and {len(reference)} steps"
    assert not waits, "the host waited for the GPU in " + ", ".join(waits)
    apart = [abs(a - b) / max(abs(b), 0.1) for a, b in zip(ours, reference, strict=True)]
    assert all(map(math.isfinite, apart)), f"losses are not finite: {ours} and {reference}"
    assert apart[0] <= FIRST_LOSS, f"the first losses differ: {ours[0]} and {reference[0]}"
    assert max(apart) <= LOSSES, f"losses drift apart: {ours} and {reference}"
    return [
        f"* {STEPS} steps of pretrain on {device}, loss {ours[0]:.4f} → {ours[-1]:.4f}: with and "
        f"without kernels at most {max(apart):.1e} apart, no wait in the loss path"
    ]


def main() -> None:
    """The check alone."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    print("\n".join(check(parser.parse_args().device)))


if __name__ == "__main__":
    main()
