"""What the fork server of `verify` imports once: Megatron on the CPU, for all ranks of all runs."""

import argparse
import contextlib
import os

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")

# Megatron warns of every optional package that is not there.
with open(os.devnull, "w") as silence, contextlib.redirect_stderr(silence):
    from megatron_dynbatch import cpu, hooks

    cpu.enable()
    hooks.install()
    from megatron.training import arguments as megatron_arguments

    # What building the parser once leaves remembered is there in every process forked from here.
    megatron_arguments.add_megatron_arguments(argparse.ArgumentParser())
