"""What a run needs to go on where it stopped: drafter, optimiser and step, written whole or not at all.

A checkpoint is a folder ``checkpoint-STEP`` with the drafter in safetensors and the rest in a file that torch loads with
``weights_only``. It is written under another name and renamed when it is on the disk; older ones go afterwards. Randomness is not
stored: every draw is seeded by the step (``data.stream``), so the step is enough.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from sglang_dflash.files import sync

PREFIX = "checkpoint-"
MODEL = "model.safetensors"
STATE = "state.pt"


class CheckpointError(ValueError):
    """There is no checkpoint to resume from, or it is of another run."""


def find(folder: Path) -> Path | None:
    """The newest checkpoint in an output folder."""
    found = [path for path in folder.glob(PREFIX + "*") if path.name.removeprefix(PREFIX).isdigit()]
    return max(found, key=lambda path: int(path.name.removeprefix(PREFIX)), default=None)


def clear(folder: Path, *, keep: Path | None = None) -> None:
    """Remove an output folder's checkpoints, and what an interrupted ``save`` left."""
    for path in folder.glob(PREFIX + "*"):
        if path != keep:
            shutil.rmtree(path)


def save(
    folder: Path, *, model: torch.nn.Module, optimizer: torch.optim.Optimizer, step: int, config: dict[str, Any]
) -> Path:
    """Write a checkpoint atomically, then remove the ones before it."""
    final = folder / f"{PREFIX}{step}"
    temporary = folder / f"{PREFIX}{step}.tmp"
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    save_file({name: tensor.contiguous() for name, tensor in model.state_dict().items()}, temporary / MODEL)
    torch.save({"optimizer": optimizer.state_dict(), "step": step, "config": config}, temporary / STATE)
    for path in (temporary / MODEL, temporary / STATE, temporary):
        sync(path)
    if final.exists():
        # The same step of the same run: nothing would be gained by replacing it.
        shutil.rmtree(temporary)
    else:
        temporary.rename(final)
        sync(folder)
    clear(folder, keep=final)
    return final


def load(folder: Path, *, model: torch.nn.Module, optimizer: torch.optim.Optimizer, config: dict[str, Any]) -> int:
    """Restore a run from an output folder's newest checkpoint; returns the steps that it has behind it.

    Raises:
        CheckpointError: no checkpoint, or another configuration wrote it; names the keys that differ.
    """
    path = find(folder)
    if path is None:
        raise CheckpointError(f"loop.resume=true, but {folder} holds no checkpoint. Start without it.")
    state = torch.load(path / STATE, map_location="cpu", weights_only=True)
    differing = sorted(
        key for key in config.keys() | state["config"].keys() if config.get(key) != state["config"].get(key)
    )
    if differing:
        changes = ", ".join(f"{key}: {state['config'].get(key)!r} there, {config.get(key)!r} here" for key in differing)
        raise CheckpointError(
            f"{path} was written by another run ({changes}). Use its values, or another output folder."
        )
    model.load_state_dict(load_file(path / MODEL))
    optimizer.load_state_dict(state["optimizer"])
    return int(state["step"])
