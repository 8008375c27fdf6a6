"""How each printed command is tested: what stands in for its placeholders, and what is not run.

A command runs as it is printed unless `why_not` has a reason; those of `SCALED` run all the same,
with the numbers of `SMALL`. test_as_printed.py asserts that every reason is needed.
"""

from __future__ import annotations

PLACEHOLDERS = {"DIR": "rollouts", "RUN_DIR": "run", "your_script.py": "examples/sft.py"}

GPUS = "GPUs, or more processes than two"
SLURM = "SLURM, and GPUs"
CLUSTER = "a Ray cluster of several machines, and GPUs"
STOCK = "a part of its command line is left out, and it would train on a GPU"
SCALED = (GPUS, SLURM, CLUSTER, STOCK)

# The beginning of a command → what running it as printed needs; the first that fits counts.
NOT_RUN = {
    "make": "a checkout: jobs of its own, which CI and release run; the wheel has no Makefile",
    "pip install .": "a checkout, and gigabytes of torch: make package-check installs the wheel",
    "pip install": "a package index and gigabytes of torch: make package-check asks for the extras",
    ".venv/bin/python -m pytest": "a checkout: it is a part of `make test`",
    "docker build": "Docker and a base image: hadolint reads the Dockerfile in tests/package",
    "ray start": "open ports: the tests start a Ray that listens on this machine only",
    "MEGATRON_LM=": "a Megatron-LM checkout: make test-stock runs its script",
    "srun": SLURM,
    "torchrun --nproc-per-node 2 examples/pretrain_gpt_sft.py": STOCK,
}


def why_not(words: list[str]) -> str | None:
    """Why a command is not run as it is printed; None: it is."""
    text = " ".join(words)
    for start, reason in NOT_RUN.items():
        if text.startswith(start):
            return reason
    if words[0] == "torchrun" and "--cpu" not in words:
        return CLUSTER if "ray://" in text else GPUS
    return None


SMALL: dict[str, str | None] = {  # None: the flag is left out
    "--num-layers": "2", "--hidden-size": "64", "--ffn-hidden-size": "128",
    "--num-attention-heads": "4", "--num-query-groups": "2", "--max-position-embeddings": "512",
    "--max-tokens-per-gpu": "256", "--tokens-per-step": "512", "--rollouts-per-step": "8",
    "--groups": "2", "--train-samples": "16", "--lr-warmup-samples": "4", "--vocab-size": "257",
    "--context-parallel-size": "1", "--pipeline-model-parallel-size": "1", "--pipeline-size": "2",
    "--tensor-model-parallel-size": "2", "--tokenizer-type": "NullTokenizer",
    "--tokenizer-model": None, "--load": None, "--save": None, "--save-interval": None,
    "--attention-backend": None, "--rotary-base": "10000", "--lr-decay-rollouts": "100",
}  # fmt: skip
LEFT_OUT = ("--finetune",)
# For `…`, where a page leaves a script's own flags to the reader.
OWN_FLAGS = (
    "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --max-position-embeddings 512 "
    "--lr 1e-3 --lr-decay-style constant --train-samples 16 --eval-iters 0 "
    "--attention-dropout 0 --hidden-dropout 0 --tokenizer-type NullTokenizer --vocab-size 257"
).split()
STOCK_FLAGS = (
    "--seq-length 64 --micro-batch-size 1 --global-batch-size 2 --log-interval 1 --eval-interval 9"
).split()


def scaled(words: list[str], folder: str, rollouts: str) -> list[str]:
    """The script and the arguments of a command of real size, with the numbers of `SMALL`.

    Args:
        words: The command.
        folder: Takes the place of /shared.
        rollouts: What takes the place of a Ray address.
    """
    rest = words[words.index("torchrun") + 1 :]
    if "megatron_dynbatch.run" in rest:
        rest = rest[rest.index("megatron_dynbatch.run") + 1 :]
    else:  # a script that installs the plugin itself, or `verify --model`
        rest = rest[next(n for n, word in enumerate(rest) if word.endswith(".py")) :]
    named = {
        "pretrain_gpt.py": "examples/pretrain_gpt_sft.py", "train.py": "examples/sft.py",
        "DIR": f"{folder}/rollouts",
    }  # fmt: skip
    rest = [named.get(word, word).replace("/shared", folder) for word in rest]
    rest = [rollouts if word.startswith("ray://") else word for word in rest]
    small: list[str] = []
    skip = False
    for word, value in zip(rest, [*rest[1:], ""], strict=True):
        if skip or word in LEFT_OUT:
            skip = False
        elif word in SMALL and not (word == "--rollouts-per-step" and value == "batch"):
            skip = True
            number = SMALL[word]
            small += [] if number is None else [word, number]
        else:
            small.append(word)
    if "own_loop" in " ".join(small):
        return small
    for name, flag in zip(OWN_FLAGS, [*OWN_FLAGS[1:], ""], strict=True):
        if name.startswith("--") and name not in small:
            small += [name, flag]
    return small if "--dynamic-global-batch" in small else [*small, *STOCK_FLAGS]
