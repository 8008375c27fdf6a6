"""How much memory a computation on the CPU holds at its peak, from every allocation it makes."""

from collections.abc import Callable

import torch


def peak_bytes(function: Callable[[], object]) -> int:
    """Most bytes allocated at once while a function runs, beyond those that were before.

    Traced at torch's allocator by its profiler, so memory inside native operators counts too. What
    the function frees that it did not allocate lowers the level.
    """
    activities = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities, profile_memory=True) as profile:
        function()
    events = profile.profiler.kineto_results.events()
    changes = sorted((e.start_ns(), e.nbytes()) for e in events if e.name() == "[memory]")
    level = peak = 0
    for _, change in changes:
        level += change
        peak = max(peak, level)
    return peak
