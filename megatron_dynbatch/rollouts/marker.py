"""The file that makes a directory a rollout directory."""

from __future__ import annotations

import json
import os
import re
import time
import uuid
from pathlib import Path

from megatron_dynbatch.rollouts.checked_paths import own_bytes
from megatron_dynbatch.rollouts.errors import RolloutDataError
from megatron_dynbatch.rollouts.files import create_text, make_folder
from megatron_dynbatch.rollouts.hidden import TEMPORARY
from megatron_dynbatch.rollouts.strict_json import parse_json

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
        self._id = ""

    @property
    def id(self) -> str:
        """The directory's own, whoever made it; "" without a marker or of an older version.

        Raises:
            RolloutDataError: The path is something other than a rollout directory.
        """
        return self._id if self.is_there() else ""

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
                self._id = _checked_id(self._path / _MARKER)
                self._is_checked = True
                return True
            except FileNotFoundError:
                names = self._foreign_names()
            if not names:
                return False
            # The marker was made between the two looks; or batches show before it, on a shared file
            # system that is not up to date.
            may_follow = any(n == _MARKER or self._batch_name.fullmatch(n) for n in names)
            if _MARKER in names and time.monotonic() >= deadline:
                raise RolloutDataError(
                    f"{self._path / _MARKER} is empty: who made it was interrupted; remove it"
                )
            if not may_follow or time.monotonic() >= deadline:
                raise RolloutDataError(
                    f"{self._path} is not a rollout directory: it holds {names[0]!r} but no "
                    f"{_MARKER}; give a new or empty directory, or one from RolloutDirectory.write"
                )
            time.sleep(min(0.1, self._timeout))

    def create(self) -> None:
        """Makes the directory and its marker, if nobody else does so at the same moment."""
        make_folder(self._path, "directory", parents=True, exist_ok=True)
        values = {"format": _FORMAT, "version": FORMAT_VERSION, "id": uuid.uuid4().hex}
        create_text(self._path / _MARKER, json.dumps(values) + "\n", "marker")

    def _foreign_names(self) -> list[str]:
        try:
            names = os.listdir(self._path)
        except FileNotFoundError:
            return []
        return sorted(name for name in names if not name.startswith(TEMPORARY))


def _checked_id(path: Path) -> str:
    """The id in a marker, "" if it has none.

    Raises:
        FileNotFoundError: There is no marker, or it is being written.
        RolloutDataError: It is not the marker of a rollout directory of this version.
    """
    try:
        content = own_bytes(path.parent, path.name)
        if not content:
            raise FileNotFoundError(path)
        marker = parse_json(content)
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
    if not isinstance(marker.get("id", ""), str):
        raise RolloutDataError(f"{path} has the id {marker['id']!r}, which is no text")
    return marker.get("id", "")
