"""The file that makes a directory a rollout directory."""

from __future__ import annotations

import json
import os
import re
import time
from pathlib import Path

from megatron_dynbatch.rollouts.checked_paths import own_json
from megatron_dynbatch.rollouts.errors import RolloutDataError
from megatron_dynbatch.rollouts.files import TEMPORARY, replace_text

FORMAT_VERSION = 3

_FORMAT = "megatron-dynbatch rollouts"
_MARKER = "dynbatch.json"


class DirectoryMarker:
    """Whether a path is a rollout directory, is nothing yet, or is something else.

    Args:
        path: The directory.
        batch_name: What batches are called.
        timeout: Seconds to look again where batches show before the marker.
    """

    def __init__(self, path: Path, batch_name: re.Pattern[str], timeout: float) -> None:
        self._path = path
        self._batch_name = batch_name
        self._timeout = timeout
        self._is_checked = False

    def is_there(self) -> bool:
        """True if marked as one; False if there is nothing yet.

        Raises:
            RolloutDataError: Anything else.
        """
        if self._is_checked:
            return True
        deadline = time.monotonic() + self._timeout
        while True:
            try:
                _check(self._path / _MARKER)
                self._is_checked = True
                return True
            except FileNotFoundError:
                names = self._foreign_names()
            if not names:
                return False
            # The marker was made between the two looks; or batches show before it, on a shared file
            # system that is not up to date.
            may_follow = any(n == _MARKER or self._batch_name.fullmatch(n) for n in names)
            if not may_follow or time.monotonic() >= deadline:
                raise RolloutDataError(
                    f"{self._path} is not a rollout directory: it holds {names[0]!r} but no "
                    f"{_MARKER}; give a new or empty directory, or one from RolloutDirectory.write"
                )
            time.sleep(min(0.1, self._timeout))

    def create(self) -> None:
        """Makes the directory and its marker."""
        self._path.mkdir(parents=True, exist_ok=True)
        text = json.dumps({"format": _FORMAT, "version": FORMAT_VERSION}) + "\n"
        replace_text(self._path / _MARKER, text)
        self._is_checked = True

    def _foreign_names(self) -> list[str]:
        try:
            names = os.listdir(self._path)
        except FileNotFoundError:
            return []
        return sorted(name for name in names if not name.startswith(TEMPORARY))


def _check(path: Path) -> None:
    try:
        marker = own_json(path.parent, path.name)
    except NotADirectoryError as error:
        raise RolloutDataError(f"{path.parent} is a file, not a rollout directory") from error
    except RolloutDataError:
        raise
    except ValueError as error:
        raise RolloutDataError(f"{path} is not valid JSON ({error})") from error
    if not isinstance(marker, dict) or marker.get("format") != _FORMAT:
        raise RolloutDataError(f"{path} does not say format {_FORMAT!r}; not a rollout directory")
    if marker.get("version") != FORMAT_VERSION:
        raise RolloutDataError(
            f"{path.parent} has format version {marker.get('version')}, this megatron_dynbatch "
            f"reads version {FORMAT_VERSION}; use the same version on both sides"
        )
