"""Bytes that torch operations read and write, counted as they are dispatched."""

from collections import defaultdict
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

ATEN = torch.ops.aten

CACHE_BYTES = 8 * 2**20

# Operations that touch only as many elements as another tensor has.
_AS_RESULT = {ATEN.gather.default, ATEN.index.Tensor, ATEN.index_select.default}
_AS_ARGUMENT = {
    ATEN.scatter_add_.default: 3, ATEN.scatter_add.default: 3, ATEN.index_put_.default: 2,
}  # fmt: skip
_ONLY_WRITE = {
    ATEN.copy_.default, ATEN.zero_.default, ATEN.fill_.Scalar, ATEN.fill_.Tensor,
    ATEN.zeros_like.default, ATEN.new_zeros.default, ATEN.zeros.default,
}  # fmt: skip
_NOTHING = {
    ATEN.empty.memory_format, ATEN.empty_like.default, ATEN.new_empty.default,
    ATEN.detach.default, ATEN.alias.default, ATEN.empty_strided.default,
}  # fmt: skip


class Cache:
    """What is left of a sequence of accesses behind a cache with write-back, oldest entry out.

    An entry is a tensor's address and size: good enough for loops that work on one chunk at a time.
    """

    def __init__(self, capacity: int) -> None:
        self.missed = 0  # bytes
        self._capacity, self._held = capacity, 0
        self._dirty: dict[tuple[int, int], bool] = {}

    @property
    def unwritten(self) -> int:
        """Bytes of written entries that are still held."""
        return sum(size for (_, size), dirty in self._dirty.items() if dirty)

    def access(self, address: int, size: int, write: bool) -> None:
        """One read or write of all of an entry."""
        if size > self._capacity // 2:  # gone before it is read again
            self.missed += size
            return
        key = (address, size)
        held = key in self._dirty
        if not held:
            self._held += size
            self.missed += 0 if write else size
        self._dirty[key] = self._dirty.pop(key, False) or write
        while self._held > self._capacity:
            (_, oldest), dirty = next(iter(self._dirty.items()))
            del self._dirty[next(iter(self._dirty))]
            self._held -= oldest
            self.missed += oldest if dirty else 0


class Addresses:
    """Where tensors lie, if memory that was freed is taken again by the next storage of its size.

    Real addresses differ from run to run, and with them what a cache holds.
    """

    def __init__(self) -> None:
        self._end = 0
        self._places: dict[int, tuple[StorageWeakRef, int, int]] = {}
        self._free: defaultdict[int, list[int]] = defaultdict(list)

    def of(self, tensor: Tensor) -> int:
        """Address of a tensor's first element."""
        storage = tensor.untyped_storage()
        place = self._places.get(storage._cdata)
        if place is None or place[0].expired():
            self._collect()
            place = (StorageWeakRef(storage), self._take(storage.nbytes()), storage.nbytes())
            self._places[storage._cdata] = place
        return place[1] + tensor.storage_offset() * tensor.element_size()

    def _collect(self) -> None:
        for key, (reference, start, size) in list(self._places.items()):
            if reference.expired():
                self._free[size].append(start)
                del self._places[key]

    def _take(self, size: int) -> int:
        if self._free[size]:
            return self._free[size].pop()
        self._end += size
        return self._end - size


class TrafficCounter(TorchDispatchMode):
    """Counts bytes of arguments and results; views and allocations cost nothing.

    Attributes:
        total: All bytes.
        missed: Those that a cache of `cache_bytes` does not catch.
    """

    def __init__(self, cache_bytes: int = CACHE_BYTES) -> None:
        super().__init__()
        self.total = 0
        self._cache = Cache(cache_bytes)
        self._addresses = Addresses()

    @property
    def missed(self) -> int:
        """Bytes from and to memory, with what the cache still has to write back."""
        return self._cache.missed + self._cache.unwritten

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if not func.is_view and func not in _NOTHING:
            self._count(func, args, kwargs or {}, result)
        return result

    def _count(self, func: Any, args: Any, kwargs: dict[str, Any], result: Any) -> None:
        out = [value for name, value in kwargs.items() if name.startswith("out")]
        written = out or _tensors(result)
        read = _tensors(args) + _tensors([v for k, v in kwargs.items() if not k.startswith("out")])
        if func in _AS_RESULT:
            self._sparse(written[0].numel() * read[0].element_size())
            read = read[1:]
        elif func in _AS_ARGUMENT:
            self._sparse(2 * args[_AS_ARGUMENT[func]].nbytes)
            read, written = read[1:], []
        elif func in _ONLY_WRITE:
            read = read[1:]
        for tensor in read:
            self._add(tensor, write=False)
        for tensor in written:
            self._add(tensor, write=True)

    def _sparse(self, size: int) -> None:
        self.total += size
        self._cache.missed += size

    def _add(self, tensor: Tensor, write: bool) -> None:
        self.total += tensor.nbytes
        self._cache.access(self._addresses.of(tensor), tensor.nbytes, write)


def _tensors(values: Any) -> list[Tensor]:
    return [v for v in torch.utils._pytree.tree_leaves(values) if isinstance(v, Tensor)]


def count_traffic(
    function: Callable[[], object], cache_bytes: int = CACHE_BYTES
) -> TrafficCounter:
    """The counter of one run of a function, backward passes included."""
    with TrafficCounter(cache_bytes) as counter:
        function()
    return counter
