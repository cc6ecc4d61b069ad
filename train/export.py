"""The drafter as a Hugging Face folder that SGLang's ``DFlashDraftModel`` loads, and back.

The keys of config.json that change what the drafter computes are always written, never left to a default: engines have guessed
taps, in-block causality and YaRN's amplitude differently. The embedding and the head are not in the folder: they are the
target's.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from sglang_dflash.files import sync
from sglang_dflash.train.config import YarnConfig
from sglang_dflash.train.model import Drafter, DrafterConfig

ARCHITECTURE = "DFlashDraftModel"


class DrafterFolderError(ValueError):
    """A folder is not a drafter that this trainer knows."""


def hf_config(config: DrafterConfig, dtype: torch.dtype) -> dict[str, Any]:
    """The content of config.json."""
    return {
        "architectures": [ARCHITECTURE],
        "model_type": "qwen3",
        "attention_bias": False,
        "block_size": config.block_size,
        "dflash_config": {
            "block_size": config.block_size,
            "mask_token_id": config.mask_token_id,
            "target_layer_ids": list(config.target_layer_ids),
        },
        "dtype": str(dtype).removeprefix("torch."),
        "head_dim": config.head_dim,
        "hidden_act": "silu",
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "is_causal": config.is_causal,
        "layer_types": ["full_attention"] * config.num_hidden_layers,
        "max_position_embeddings": config.max_position_embeddings,
        "num_attention_heads": config.num_attention_heads,
        "num_hidden_layers": config.num_hidden_layers,
        "num_key_value_heads": config.num_key_value_heads,
        "num_target_layers": config.num_target_layers,
        "rms_norm_eps": config.rms_norm_eps,
        "rope_scaling": None if config.yarn is None else _rope_scaling(config.yarn),
        "rope_theta": config.rope_theta,
        "tie_word_embeddings": False,
        "vocab_size": config.vocab_size,
    }


def _rope_scaling(yarn: YarnConfig) -> dict[str, Any]:
    # Hugging Face takes attention_factor as the amplitude; SGLang multiplies attn_factor with a ratio that is 1 where mscale
    # equals mscale_all_dim.
    return {
        "rope_type": "yarn",
        **yarn.model_dump(exclude={"amplitude"}),
        "attention_factor": yarn.amplitude,
        "attn_factor": yarn.amplitude,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
    }


def export(drafter: Drafter, folder: Path, *, dtype: torch.dtype, provenance: dict[str, str]) -> Path:
    """Write config.json and model.safetensors: each whole or not at all, the weights last.

    Args:
        dtype: of the exported weights.
        provenance: string metadata for the weights' header (data, recipe, versions).
    """
    folder.mkdir(parents=True, exist_ok=True)
    weights = {name: tensor.detach().to("cpu", dtype).contiguous() for name, tensor in drafter.state_dict().items()}
    config, model = folder / "config.json", folder / "model.safetensors"
    new_config, new_model = folder / "config.json.tmp", folder / "model.safetensors.tmp"
    new_config.write_text(json.dumps(hf_config(drafter.config, dtype), indent=1) + "\n")
    save_file(weights, new_model, metadata={"format": "pt", **provenance})
    for path in (new_config, new_model):
        sync(path)
    new_config.rename(config)
    new_model.rename(model)
    sync(folder)
    return folder


def load_drafter(folder: Path) -> Drafter:
    """Read back what ``export`` wrote, in the dtype it was written in.

    Raises:
        DrafterFolderError: the folder is not a plain DFlash drafter with a default or YaRN rotary embedding; says why.
        RuntimeError: a weight is missing or has another shape (torch names it).
    """
    try:
        data = json.loads((folder / "config.json").read_text())
        if data["architectures"] != [ARCHITECTURE]:
            raise DrafterFolderError(
                f"{folder} has architectures {data['architectures']}; this reads {ARCHITECTURE} alone."
            )
        dflash = data["dflash_config"]
        elsewhere = {"target_layer_ids", "mask_token_id", "yarn"}
        config = DrafterConfig(
            **{name: data[name] for name in DrafterConfig.__dataclass_fields__ if name not in elsewhere},
            target_layer_ids=tuple(dflash["target_layer_ids"]),
            mask_token_id=dflash["mask_token_id"],
            yarn=_yarn(data["rope_scaling"], folder),
        )
        dtype = getattr(torch, data["dtype"])
        weights = load_file(folder / "model.safetensors")
    except (OSError, KeyError, json.JSONDecodeError) as error:
        raise DrafterFolderError(f"{folder} is not a drafter that this trainer exported: {error!r}") from error
    drafter = Drafter(config).to(dtype)
    drafter.load_state_dict(weights)
    return drafter


def _yarn(rope_scaling: dict[str, Any] | None, folder: Path) -> YarnConfig | None:
    if rope_scaling is None:
        return None
    kind = rope_scaling.get("rope_type")
    if kind != "yarn":
        raise DrafterFolderError(f"{folder} has rope type {kind!r}; this trainer knows the default one and yarn.")
    kept = {name: rope_scaling[name] for name in YarnConfig.model_fields if name != "amplitude"}
    return YarnConfig(**kept, amplitude=rope_scaling["attention_factor"])
