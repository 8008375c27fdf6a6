"""`make gpu-check` as far as it runs without a GPU: its checks and the rows of its tables.

On the host the checks compare the torch implementation with itself; what is tested is the script.
"""

from collections.abc import Callable

import pytest
import torch

from benchmarks import gpu_pretrain, reduce_gpu_table
from benchmarks import reduce_gpu_checks as checks

HOST = torch.device("cpu")


def test_checks_run_on_the_host():
    assert checks.check_reductions(HOST, small=True) > 20
    assert checks.check_policy(HOST, small=True) == len(checks.FORMULAS)


def test_checks_find_a_wrong_sum(monkeypatch):
    sums = checks.segment_sums
    monkeypatch.setattr(checks, "segment_sums", lambda *a, **k: [s + 1 for s in sums(*a, **k)])
    with pytest.raises(AssertionError):
        checks.check_reductions(HOST, small=True)


def test_rows_of_the_tables(monkeypatch):
    def run_once(function: Callable[[], object], *_: int) -> float:
        function()
        return 1.0

    for timer in ("microseconds", "graph_microseconds", "kernel_launches"):
        monkeypatch.setattr(reduce_gpu_table, timer, run_once)
    monkeypatch.setattr(reduce_gpu_table, "SHAPES", [(4, 64, 2)])
    rows = reduce_gpu_table.reductions(HOST)
    assert len(rows) == 3 and rows[0].count("|") == rows[2].count("|")
    rows = reduce_gpu_table.from_logits(HOST, tokens=6, vocabulary=16)
    assert rows[2].startswith("| 6 | 16 | ours |")


def test_a_missing_megatron_is_one_line(monkeypatch):
    monkeypatch.setattr(gpu_pretrain.importlib.util, "find_spec", lambda name: None)
    assert gpu_pretrain.check("cpu") == [
        "* megatron-core is not installed: the 20 steps of pretrain did not run"
    ]
