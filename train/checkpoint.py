"""What a run needs to go on where it stopped: drafter, optimiser and step, written whole or not at all.

Randomness is not stored: every draw is seeded by the step (``data.batches``), so the step is enough.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch

CHECKPOINT = "checkpoint.pt"


class CheckpointError(ValueError):
    """There is no checkpoint to resume from, or it is of another run."""


def save(
    folder: Path, *, model: torch.nn.Module, optimizer: torch.optim.Optimizer, step: int, config: dict[str, Any]
) -> None:
    """Write the checkpoint atomically."""
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step, "config": config}
    temporary = folder / (CHECKPOINT + ".tmp")
    with temporary.open("wb") as file:
        torch.save(state, file)
        file.flush()
        os.fsync(file.fileno())
    temporary.rename(folder / CHECKPOINT)


def load(folder: Path, *, model: torch.nn.Module, optimizer: torch.optim.Optimizer, config: dict[str, Any]) -> int:
    """Restore a run; returns the step to go on with.

    Raises:
        CheckpointError: no checkpoint, or another configuration wrote it; names the keys that differ.
    """
    path = folder / CHECKPOINT
    if not path.is_file():
        raise CheckpointError(f"loop.resume=true, but {path} does not exist. Start without it.")
    state = torch.load(path, map_location="cpu", weights_only=True)
    differing = sorted(
        key for key in config.keys() | state["config"].keys() if config.get(key) != state["config"].get(key)
    )
    if differing:
        changes = ", ".join(f"{key}: {state['config'].get(key)!r} there, {config.get(key)!r} here" for key in differing)
        raise CheckpointError(
            f"{path} was written by another run ({changes}). Use its values, or another output folder."
        )
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    return int(state["step"])
