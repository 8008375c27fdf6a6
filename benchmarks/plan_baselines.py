"""Packers to compare with: simple ones re-stated here, and other projects' own functions.

Each takes lengths, costs, dp and the cap, and answers ranks: [dp][M] lists of sample numbers.
Other projects' functions are loaded from a folder that `make bench-plan` fills with
`pip install --no-deps --target`; what else their modules import is replaced by inert stand-ins.
Only the loop around a packer (equal counts on all ranks) is written here.
"""

from __future__ import annotations

import heapq
import importlib.util
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest.mock import MagicMock

from megatron_dynbatch.plan import first_fit_pack

Ranks = list[list[list[int]]]
Packer = Callable[[list[int], list[int], int, int], Ranks]

# File of each peer's packing functions, below the folder or a wheel's data folder in it.
PEER_FILES = {
    "verl": "verl/utils/seqlen_balancing.py",
    "areal": "areal/utils/seqpack.py",
    "openrlhf": "openrlhf/utils/seqlen_balancing.py",
}


def first_fit_stride(lengths: list[int], costs: list[int], dp: int, cap: int) -> Ranks:
    """First-fit in arrival order, micro-batches to ranks by stride, padded with dummies."""
    bins = first_fit_pack(lengths, cap)
    count = -(-len(bins) // dp)
    bins += [[] for _ in range(dp * count - len(bins))]
    return [bins[rank::dp] for rank in range(dp)]


def equal_count_kk(lengths: list[int], costs: list[int], dp: int, cap: int) -> Ranks:
    """Samples to ranks by differencing with equal counts, then first-fit-decreasing per rank."""
    padded = costs + [0] * (-len(costs) % dp)
    shares = _differencing(padded, dp)
    ranks: Ranks = []
    for share in shares:
        items = sorted((i for i in share if i < len(costs)), key=lambda i: (-lengths[i], i))
        bins = first_fit_pack([lengths[i] for i in items], cap)
        ranks.append([[items[k] for k in members] for members in bins])
    return _equal_counts(ranks)


def _differencing(costs: Sequence[int], dp: int) -> list[list[int]]:
    """Karmarkar-Karp on rows of dp items of like cost: every part gets one item of each row."""
    order = sorted(range(len(costs)), key=lambda i: (-costs[i], i))
    states = [
        [(costs[i], [i]) for i in order[start : start + dp]] for start in range(0, len(order), dp)
    ]
    while len(states) > 1:
        states.sort(key=lambda state: state[0][0] - state[-1][0])
        first, second = states.pop(), states.pop()
        merged = [(a[0] + b[0], a[1] + b[1]) for a, b in zip(first, reversed(second), strict=True)]
        states.append(sorted(merged, key=lambda part: -part[0]))
    return [members for _, members in states[0]]


def _equal_counts(ranks: Ranks) -> Ranks:
    count = max(len(rank) for rank in ranks)
    return [rank + [[] for _ in range(count - len(rank))] for rank in ranks]


def longest_processing_time(
    lengths: list[int], costs: list[int], dp: int, cap: int, count: int
) -> Ranks | None:
    """LPT into dp · count micro-batches under the cap, rows of like cost; None if it fails."""
    loads = [(0, number) for number in range(dp * count)]
    rooms = [cap] * (dp * count)
    bins: list[list[int]] = [[] for _ in range(dp * count)]
    for item in sorted(range(len(costs)), key=lambda i: (-costs[i], i)):
        full: list[tuple[int, int]] = []
        while loads and rooms[loads[0][1]] < lengths[item]:
            full.append(heapq.heappop(loads))
        if not loads:
            return None
        load, number = heapq.heappop(loads)
        bins[number].append(item)
        rooms[number] -= lengths[item]
        for entry in [*full, (load + costs[item], number)]:
            heapq.heappush(loads, entry)
    bins.sort(key=lambda members: -sum(costs[i] for i in members))
    return [bins[rank::dp] for rank in range(dp)]


BASELINES: dict[str, Packer] = {
    "first-fit + stride": first_fit_stride,
    "KK equal counts + FFD": equal_count_kk,
}


def load_peers(folder: Path) -> tuple[dict[str, Packer], list[str]]:
    """Packers of the peers installed in `folder`, and a line for each that is not usable."""
    builders = {"verl": _verl, "areal": _areal, "openrlhf": _openrlhf}
    packers: dict[str, Packer] = {}
    problems: list[str] = []
    for name, file in PEER_FILES.items():
        path = next(iter(sorted(folder.rglob(file))), None)
        if path is None:
            problems.append(f"{name}: no {file} in {folder}")
            continue
        try:
            packers[name] = builders[name](_load(path))
        except Exception as error:  # another project's module may fail in any way
            problems.append(f"{name}: {error!r}")
    return packers, problems


class _StandIn(ModuleType):
    """A module that is not installed: every name in it is an inert object."""

    __path__: list[str] = []

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return MagicMock()


def _load(path: Path) -> ModuleType:
    """Run a module's file; packages that are not installed become stand-ins."""
    stand_ins: list[str] = []
    while True:
        spec = importlib.util.spec_from_file_location(f"peer_{path.parts[-3]}", path)
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        try:
            spec.loader.exec_module(module)
            return module
        except ModuleNotFoundError as error:
            if error.name is None or error.name in stand_ins:
                raise
            stand_ins.append(error.name)
            sys.modules[error.name] = _StandIn(error.name)


def _verl(module: Any) -> Packer:
    def pack(lengths: list[int], costs: list[int], dp: int, cap: int) -> Ranks:
        split = module.get_seqlen_balanced_partitions
        shares = split(costs, dp, len(lengths) % dp == 0)
        count = max(-(-sum(lengths[i] for i in share) // cap) for share in shares)
        while True:
            ranks = [
                [
                    [share[k] for k in part]
                    for part in split([costs[i] for i in share], count, False)
                ]
                for share in shares
            ]
            if all(sum(lengths[i] for i in mb) <= cap for rank in ranks for mb in rank):
                return ranks
            count += 1

    return pack


def _areal(module: Any) -> Packer:
    def pack(lengths: list[int], costs: list[int], dp: int, cap: int) -> Ranks:
        allocate = module.ffd_allocate
        shares = allocate(lengths, 10**12, dp)
        count = 1
        while True:
            ranks = [
                [
                    [share[k] for k in part]
                    for part in allocate([lengths[i] for i in share], cap, count)
                ]
                for share in shares
            ]
            if len({len(rank) for rank in ranks}) == 1:
                return ranks
            count = max(len(rank) for rank in ranks)

    return pack


def _openrlhf(module: Any) -> Packer:
    def pack(lengths: list[int], costs: list[int], dp: int, cap: int) -> Ranks:
        split = module.get_seqlen_balanced_partitions
        shares = split(lengths, dp, len(lengths) % dp == 0)
        count = max(
            module.get_minimum_num_micro_batch_size([lengths[i] for i in share], cap, 1, 1)
            for share in shares
        )
        return [
            [[share[k] for k in part] for part in split([lengths[i] for i in share], count, False)]
            for share in shares
        ]

    return pack
