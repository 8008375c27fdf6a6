"""What the fork server of `tests.pool` imports once for all ranks."""

import argparse
import contextlib
import os

os.environ["OMP_NUM_THREADS"] = "1"
os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")

# Megatron warns of every optional package that is not there.
with open(os.devnull, "w") as silence, contextlib.redirect_stderr(silence):
    import torch

    from megatron_dynbatch import cpu

    torch.set_num_threads(1)
    cpu.enable()
    from megatron.training import arguments as megatron_arguments

    # What building the parser once leaves remembered is there in every process forked from here.
    megatron_arguments.add_megatron_arguments(argparse.ArgumentParser())
