from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from sglang_dflash.train.model import Drafter
from sglang_dflash.train.target import TargetError, copy_last_layers, open_target

MakeDrafter = Callable[..., Drafter]


def configured(folder: Path, **changes: Any) -> Path:
    """Change a target's config.json."""
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))
    return folder


@pytest.fixture
def own(target: Path, tmp_path: Path) -> Path:
    """A copy of the small target that a test may change."""
    return shutil.copytree(target, tmp_path / "own")


def test_tensors_are_found_in_any_file(own: Path) -> None:
    weights = load_file(own / "model.safetensors")
    names = sorted(weights)
    (own / "model.safetensors").unlink()
    for part in (0, 1):
        save_file({name: weights[name].bfloat16() for name in names[part::2]}, own / f"model-{part}.safetensors")
    target = open_target(own)
    assert set(target.file_of) == set(names)
    for name in names:
        tensor = target.tensor(name)
        assert tensor.dtype == torch.float32 and torch.equal(tensor, weights[name].bfloat16().float())
    with pytest.raises(TargetError, match=r"has no tensor model\.layers\.9"):
        target.tensor("model.layers.9.mlp.up_proj.weight")


def test_tied_and_untied_heads(own: Path) -> None:
    embedding, head = open_target(own).embedding_and_head()
    assert head is embedding and embedding.shape == (48, 32)
    save_file({"lm_head.weight": torch.full((48, 32), 2.0)}, own / "head.safetensors")
    stray = open_target(own).embedding_and_head()
    assert stray[1] is stray[0], "the config decides"
    _, head = open_target(configured(own, tie_word_embeddings=False)).embedding_and_head()
    assert bool((head == 2).all())


def test_an_untied_head_under_another_name_is_refused(own: Path) -> None:
    save_file({"lm_head.qweight": torch.zeros(48, 32)}, own / "head.safetensors")
    with pytest.raises(TargetError, match=r"lm_head\.weight"):
        open_target(configured(own, tie_word_embeddings=False)).embedding_and_head()


def test_a_text_config_is_preferred(own: Path) -> None:
    text = json.loads((own / "config.json").read_text())
    (own / "config.json").write_text(json.dumps({"hidden_size": 1, "text_config": text}))
    assert open_target(own).config == text


@pytest.mark.parametrize(
    ("changes", "theta"),
    [
        ({}, 10000.0),
        ({"rope_theta": 5e5}, 5e5),
        ({"rope_theta": None, "rope_parameters": {"rope_type": "default", "rope_theta": 1e6}}, 1e6),
        ({"rope_scaling": None, "rope_theta": 7}, 7.0),
    ],
)
def test_rope_base(changes: dict[str, Any], theta: float, own: Path) -> None:
    assert open_target(configured(own, **changes)).rope_theta == theta


@pytest.mark.parametrize(
    ("changes", "kind"),
    [
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "default"),
        ({"rope_parameters": {"rope_type": "llama3", "rope_theta": 5e5}}, "llama3"),
        pytest.param(
            {"rope_parameters": {name: {"rope_type": "default", "rope_theta": 1e6} for name in ("full", "sliding")}},
            "",
            id="per-layer-kind",
        ),
    ],
)
def test_scaled_positions_are_refused(changes: dict[str, Any], kind: str, own: Path) -> None:
    with pytest.raises(TargetError, match=f"rope type '{kind}"):
        _ = open_target(configured(own, **changes)).rope_theta


def test_what_is_no_target_is_refused(own: Path, tmp_path: Path) -> None:
    with pytest.raises(TargetError, match="is not a Hugging Face model folder"):
        open_target(tmp_path / "nowhere")
    (own / "model.safetensors").unlink()
    with pytest.raises(TargetError, match=r"has no \*\.safetensors files"):
        open_target(own)
    (own / "config.json").write_text("{")
    with pytest.raises(TargetError, match="is not a Hugging Face model folder"):
        open_target(own)


def test_a_broken_file_is_named(own: Path) -> None:
    (own / "broken.safetensors").write_bytes(b"xx")
    with pytest.raises(TargetError, match=r"broken\.safetensors"):
        open_target(own)


def test_a_drafter_starts_from_the_last_layers(target: Path, make_drafter: MakeDrafter) -> None:
    drafter = make_drafter(head_dim=8)
    before = {name: tensor.clone() for name, tensor in drafter.state_dict().items()}
    copy_last_layers(drafter, open_target(target))
    weights = load_file(target / "model.safetensors")
    for name, tensor in drafter.state_dict().items():
        if not name.startswith("layers.") or "q_norm" in name or "k_norm" in name:
            assert torch.equal(tensor, before[name])
            continue
        _, layer, rest = name.split(".", 2)
        assert torch.equal(tensor, weights[f"model.layers.{2 + int(layer)}.{rest}"])


def test_shapes_that_do_not_fit_are_refused(target: Path, make_drafter: MakeDrafter) -> None:
    with pytest.raises(
        TargetError, match=r"q_proj\.weight has shape \(32, 32\), the drafter's \(64, 32\); set model\.init"
    ):
        copy_last_layers(make_drafter(), open_target(target))
    with pytest.raises(TargetError, match=r"has no tensor model\.layers\.-1"):
        copy_last_layers(make_drafter(head_dim=8, num_hidden_layers=5), open_target(target))
