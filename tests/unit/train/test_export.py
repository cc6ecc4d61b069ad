from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors import safe_open

from sglang_dflash.train import export as export_module
from sglang_dflash.train.config import YarnConfig
from sglang_dflash.train.export import DrafterFolderError, export, load_drafter
from sglang_dflash.train.model import Drafter

YARN = YarnConfig(factor=8, original_max_position_embeddings=32, amplitude=1.25)
MakeDrafter = Callable[..., Drafter]


@pytest.mark.parametrize("yarn", [None, YARN])
def test_what_is_read_back_is_what_was_written(
    yarn: YarnConfig | None, make_drafter: MakeDrafter, tmp_path: Path
) -> None:
    drafter = make_drafter(is_causal=True, yarn=yarn)
    assert (
        export(drafter, tmp_path / "new" / "drafter", dtype=torch.float32, provenance={})
        == tmp_path / "new" / "drafter"
    )
    back = load_drafter(tmp_path / "new" / "drafter")
    assert back.config == drafter.config
    expected = drafter.state_dict()
    assert back.state_dict().keys() == expected.keys()
    assert all(torch.equal(tensor, expected[name]) for name, tensor in back.state_dict().items())
    assert sorted(path.name for path in (tmp_path / "new" / "drafter").iterdir()) == [
        "config.json",
        "model.safetensors",
    ]


def test_weights_are_written_in_the_asked_dtype(make_drafter: MakeDrafter, tmp_path: Path) -> None:
    drafter = make_drafter()
    export(drafter, tmp_path, dtype=torch.bfloat16, provenance={"dump": "07", "recipe": "{}"})
    with safe_open(tmp_path / "model.safetensors", framework="pt") as file:
        assert file.metadata() == {"format": "pt", "dump": "07", "recipe": "{}"}
    assert json.loads((tmp_path / "config.json").read_text())["dtype"] == "bfloat16"
    back = load_drafter(tmp_path)
    assert torch.equal(back.fc.weight, drafter.fc.weight.bfloat16())
    assert drafter.fc.weight.dtype == torch.float32, "the drafter itself stays as it is"


def test_an_interrupted_export_leaves_the_one_before(
    make_drafter: MakeDrafter, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    export(make_drafter(), tmp_path, dtype=torch.float32, provenance={})

    def die(*args: object, **kwargs: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(export_module, "save_file", die)
    with pytest.raises(KeyboardInterrupt):
        export(make_drafter(block_size=8), tmp_path, dtype=torch.bfloat16, provenance={})
    assert load_drafter(tmp_path).config.block_size == 4


def test_other_drafters_are_refused(make_drafter: MakeDrafter, tmp_path: Path) -> None:
    export(make_drafter(yarn=YARN), tmp_path, dtype=torch.float32, provenance={})
    path = tmp_path / "config.json"
    good = json.loads(path.read_text())
    for changes, expected in (
        ({"architectures": ["DFlash2DraftModel"]}, "DFlash2DraftModel.*this reads DFlashDraftModel alone"),
        ({"rope_scaling": {"rope_type": "llama3"}}, "rope type 'llama3'; this trainer knows the default one and yarn"),
        ({"dflash_config": {}}, "not a drafter that this trainer exported: KeyError"),
    ):
        path.write_text(json.dumps({**good, **changes}))
        with pytest.raises(DrafterFolderError, match=expected):
            load_drafter(tmp_path)
    path.write_text("{")
    with pytest.raises(DrafterFolderError, match="JSONDecodeError"):
        load_drafter(tmp_path)
    with pytest.raises(DrafterFolderError, match="FileNotFoundError"):
        load_drafter(tmp_path / "nowhere")


@pytest.mark.parametrize("yarn", [None, YARN])
def test_hugging_face_and_sglang_parse_the_config(
    yarn: YarnConfig | None, make_drafter: MakeDrafter, tmp_path: Path
) -> None:
    from sglang.srt.speculative.dflash_utils import get_dflash_layer_types, parse_dflash_draft_config
    from transformers import AutoConfig

    drafter = make_drafter(yarn=yarn)
    export(drafter, tmp_path, dtype=torch.bfloat16, provenance={})
    config = AutoConfig.from_pretrained(tmp_path)
    assert (config.model_type, config.dtype, config.is_causal) == ("qwen3", torch.bfloat16, False)
    assert config.rope_parameters["rope_theta"] == 10000.0
    assert config.rope_parameters["rope_type"] == ("default" if yarn is None else "yarn")
    parsed = parse_dflash_draft_config(draft_hf_config=config)
    assert parsed.target_layer_ids == list(drafter.config.target_layer_ids)
    assert (parsed.mask_token_id, parsed.block_size, parsed.num_target_layers, parsed.num_hidden_layers) == (
        47,
        4,
        4,
        2,
    )
    assert (parsed.projector_type, parsed.conv_kernel_size, parsed.attention_sink_bias) == (None, 0, False)
    assert list(get_dflash_layer_types(config)) == ["full_attention"] * 2


@torch.no_grad()
def test_stock_sglang_computes_what_the_trainer_does(make_drafter: MakeDrafter, tmp_path: Path) -> None:
    """Every weight is loaded, and the block's hidden states agree; attention itself is a dense stand-in on SGLang's side."""
    drafters = [make_drafter(), make_drafter(is_causal=True, yarn=YARN, block_size=6)]
    folders = [
        str(export(drafter, tmp_path / str(i), dtype=torch.float32, provenance={}))
        for i, drafter in enumerate(drafters)
    ]
    generator = torch.Generator().manual_seed(4)
    taps_TF = torch.randn(70, drafters[0].fc.in_features, generator=generator)
    embedding_VH = torch.randn(48, 32, generator=generator)
    token_S = torch.tensor([5] + [47] * 5)
    torch.save({"folders": folders, "taps_TF": taps_TF, "embedding_SH": embedding_VH[token_S]}, tmp_path / "request")
    script = Path(__file__).with_name("stock_drafter.py")
    done = subprocess.run(
        [sys.executable, str(script), str(tmp_path / "request"), str(tmp_path / "answer")],
        capture_output=True,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr[-3000:]
    for drafter, answer in zip(drafters, torch.load(tmp_path / "answer"), strict=True):
        assert answer["unloaded"] == [], "parameters that no exported weight reached"
        assert answer["block_size"] == drafter.config.block_size
        assert answer["attn_type"] == ("DECODER" if drafter.config.is_causal else "ENCODER_ONLY")
        # SGLang fuses q, k, v and gate, up; everything else has our shapes.
        own = {name: tuple(tensor.shape) for name, tensor in drafter.state_dict().items()}
        fused = {name for name in answer["shapes"] if "qkv_proj" in name or "gate_up_proj" in name}
        assert {name: shape for name, shape in answer["shapes"].items() if name not in fused} == {
            name: own[name]
            for name in own
            if not any(part in name for part in ("q_proj", "k_proj", "v_proj", "gate_", "up_"))
        }
        # The script's block has six rows whatever the drafter's size: compare with a drafter told so.
        twin = make_drafter(is_causal=drafter.config.is_causal, yarn=drafter.config.yarn, block_size=6)
        hidden_BASH = twin(twin.context(taps_TF[None]), torch.tensor([[70]]), torch.tensor([[5]]), embedding_VH)
        # fp32 on both sides; SGLang rounds cos and sin into a cache and sums in another order.
        torch.testing.assert_close(answer["hidden_SH"], hidden_BASH[0, 0], rtol=1e-3, atol=1e-3)
