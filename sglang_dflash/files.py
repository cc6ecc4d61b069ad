"""Writing files so that a kill leaves the old one or the new one. Whoever needs more than one file in step does that itself."""

from __future__ import annotations

import os
from pathlib import Path


def sync(path: Path) -> None:
    """Put a file, or a folder's list of names, on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_text(path: Path, text: str) -> None:
    """Replace a text file: whole or not at all, and on the disk when this returns."""
    temporary = path.with_suffix(path.suffix + ".tmp")
    temporary.write_text(text)
    sync(temporary)
    temporary.rename(path)
    sync(path.parent)
