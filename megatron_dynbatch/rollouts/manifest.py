"""What belongs to a batch: its stamp and the checksums of its Parquet footers.

Parquet keeps checksums of its pages but not of the footer, where a single turned bit renames a
column or moves an offset. The stamp makes the footers of two batches differ, so that a stale copy
of a file is noticed too.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from megatron_dynbatch.rollouts.checked_paths import own_json
from megatron_dynbatch.rollouts.errors import RolloutDataError
from megatron_dynbatch.rollouts.files import write_text
from megatron_dynbatch.rollouts.parquet_file import CheckedFile, Stored, footer_crc

MANIFEST = "manifest.json"


@dataclass(frozen=True)
class Manifest:
    """Of one batch.

    Attributes:
        stamp: Unique to the batch.
        footers: File name → CRC-32 of its footer.
    """

    stamp: str
    footers: Mapping[str, int]

    def checked(self, path: Path) -> Stored:
        """A file of the batch, to be compared with what the manifest says of it.

        Raises:
            RolloutDataError: The manifest does not know it.
        """
        if path.name not in self.footers:
            raise RolloutDataError(f"{path} is not in the manifest of its batch; write it again")
        return CheckedFile(path, self.footers[path.name])


def write_manifest(batch: Path, stamp: str) -> None:
    """Writes the manifest of the Parquet files that are there now."""
    footers = {path.name: footer_crc(path) for path in sorted(batch.glob("*.parquet"))}
    text = json.dumps({"stamp": stamp, "footers": footers})
    write_text(batch / MANIFEST, text, "manifest")


def read_manifest(batch: Path) -> Manifest:
    """The manifest of a batch.

    Raises:
        FileNotFoundError: It has none, or does not show it yet.
        RolloutDataError: It is damaged.
    """
    path = batch / MANIFEST
    try:
        values = own_json(batch.parent, batch.name, MANIFEST)
        footers = {str(name): int(crc) for name, crc in values["footers"].items()}
        return Manifest(str(values["stamp"]), footers)
    except RolloutDataError:
        raise
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise RolloutDataError(
            f"{path}: not the manifest of a batch ({error!r}); it is damaged: write the batch again"
        ) from error
