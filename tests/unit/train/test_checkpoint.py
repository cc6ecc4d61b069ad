from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from sglang_dflash.train import checkpoint
from sglang_dflash.train.checkpoint import CheckpointError


def trained(steps: int) -> dict[str, Any]:
    """A model and its optimiser after some steps."""
    torch.manual_seed(0)
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.ones(3)).square().sum().backward()
        optimizer.step()
    return {"model": model, "optimizer": optimizer}


def test_resumed_training_goes_on_to_the_bit(tmp_path: Path) -> None:
    run = trained(3)
    path = checkpoint.save(tmp_path, **run, step=3, config={"a": 1})
    assert path == tmp_path / "checkpoint-3" == checkpoint.find(tmp_path)
    assert sorted(p.name for p in path.iterdir()) == ["model.safetensors", "state.pt"]
    other = trained(0)
    assert checkpoint.load(tmp_path, **other, config={"a": 1}) == 3
    for parts in (run, other):
        parts["optimizer"].zero_grad()
        parts["model"](torch.ones(3)).square().sum().backward()
        parts["optimizer"].step()
    assert all(torch.equal(a, b) for a, b in zip(run["model"].parameters(), other["model"].parameters(), strict=True))


def test_the_newest_remains(tmp_path: Path) -> None:
    for step in (9, 10):
        checkpoint.save(tmp_path, **trained(1), step=step, config={})
    checkpoint.save(tmp_path, **trained(1), step=10, config={})
    assert [p.name for p in tmp_path.iterdir()] == ["checkpoint-10"]
    checkpoint.clear(tmp_path)
    assert checkpoint.find(tmp_path) is None


@pytest.mark.parametrize("dies_in", ["save_file", "sync", "torch.save"])
def test_an_interrupted_save_leaves_the_one_before(
    dies_in: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint.save(tmp_path, **trained(1), step=1, config={})

    def die(*args: Any, **kwargs: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(*((torch, "save") if dies_in == "torch.save" else (checkpoint, dies_in)), die)
        with pytest.raises(KeyboardInterrupt):
            checkpoint.save(tmp_path, **trained(2), step=2, config={})
    assert checkpoint.find(tmp_path) == tmp_path / "checkpoint-1"
    assert checkpoint.load(tmp_path, **trained(0), config={}) == 1
    checkpoint.save(tmp_path, **trained(2), step=2, config={})
    assert [p.name for p in tmp_path.iterdir()] == ["checkpoint-2"], "what was left is taken away"


def test_another_run_is_refused_by_its_keys(tmp_path: Path) -> None:
    checkpoint.save(tmp_path, **trained(1), step=1, config={"optim.lr": 0.1, "loop.seed": 0, "old": 1})
    with pytest.raises(CheckpointError) as caught:
        checkpoint.load(tmp_path, **trained(0), config={"optim.lr": 0.2, "loop.seed": 0, "new": 2})
    assert "optim.lr: 0.1 there, 0.2 here" in str(caught.value)
    assert "new: None there, 2 here" in str(caught.value) and "old: 1 there, None here" in str(caught.value)
    assert "loop.seed" not in str(caught.value)


def test_nothing_to_resume_from(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="holds no checkpoint"):
        checkpoint.load(tmp_path, **trained(0), config={})
