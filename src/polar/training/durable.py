"""Files that are there whole or not at all, whatever ends the process."""

import os
from pathlib import Path


def sync(path: Path) -> None:
    """Have what is written of a file or directory survive a power cut."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_durably(path: Path, content: bytes) -> None:
    """Write a file whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    building = path.with_name(f".{path.name}")
    building.write_bytes(content)
    sync(building)
    building.rename(path)
    sync(path.parent)
