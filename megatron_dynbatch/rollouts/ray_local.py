"""A Ray of this machine alone, which no other machine can reach."""

from __future__ import annotations

import os
from typing import Any

import ray
from ray._private import ray_constants


def start_local_ray(**options: Any) -> None:
    """Start a Ray whose servers listen on 127.0.0.1 only.

    Otherwise they listen on every interface: Ray turns a loopback node address into the machine's
    own, unless its switch for machines that form no cluster is set.

    Args:
        options: Of `ray.init`.

    Raises:
        RuntimeError: This process is connected to a Ray already.
    """
    os.environ["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"  # read by the processes that Ray starts
    ray_constants.ENABLE_RAY_CLUSTER = False  # what this process read when it imported ray
    ray.init(address="local", include_dashboard=False, log_to_driver=False, **options)
