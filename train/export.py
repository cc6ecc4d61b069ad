"""The drafter as a Hugging Face folder that SGLang's ``DFlashDraftModel`` loads, and back.

The keys of config.json that change what the drafter computes are always written, never left to a default that engines disagree
on (research: taps and in-block causality have each been guessed wrong). The embedding and the head are not in the folder: they
are the target's.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from sglang_dflash.train.model import Drafter, DrafterConfig


def hf_config(config: DrafterConfig, dtype: str) -> dict[str, Any]:
    """The content of config.json."""
    return {
        "architectures": ["DFlashDraftModel"],
        "model_type": "qwen3",
        "attention_bias": False,
        "block_size": config.block_size,
        "dflash_config": {
            "block_size": config.block_size,
            "mask_token_id": config.mask_token_id,
            "target_layer_ids": list(config.target_layer_ids),
        },
        "dtype": dtype,
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
        "rope_theta": config.rope_theta,
        "tie_word_embeddings": False,
        "vocab_size": config.vocab_size,
    }


def export(drafter: Drafter, folder: Path, *, provenance: dict[str, str]) -> Path:
    """Write config.json and model.safetensors; the weights appear last, whole.

    Args:
        provenance: string metadata for the weights' header (data, recipe, versions).
    """
    folder.mkdir(parents=True, exist_ok=True)
    weights = {name: tensor.detach().cpu().contiguous() for name, tensor in drafter.state_dict().items()}
    dtype = str(next(iter(weights.values())).dtype).removeprefix("torch.")
    _write_text(folder / "config.json", json.dumps(hf_config(drafter.config, dtype), indent=1) + "\n")
    path = folder / "model.safetensors"
    temporary = path.with_suffix(".tmp")
    save_file(weights, temporary, metadata={"format": "pt", **provenance})
    temporary.rename(path)
    return folder


def _write_text(path: Path, text: str) -> None:
    temporary = path.with_suffix(".tmp")
    temporary.write_text(text)
    temporary.rename(path)


def load_drafter(folder: Path) -> Drafter:
    """Read back what ``export`` wrote.

    Raises:
        ValueError: the folder's architecture is not a plain DFlash drafter.
        RuntimeError: a weight is missing or has another shape (torch names it).
    """
    data = json.loads((folder / "config.json").read_text())
    if data["architectures"] != ["DFlashDraftModel"]:
        raise ValueError(f"{folder} has architectures {data['architectures']}; this reads DFlashDraftModel.")
    dflash = data["dflash_config"]
    own = set(DrafterConfig.__dataclass_fields__) - {"target_layer_ids", "mask_token_id"}
    config = DrafterConfig(
        **{name: data[name] for name in own},
        target_layer_ids=tuple(dflash["target_layer_ids"]),
        mask_token_id=dflash["mask_token_id"],
    )
    drafter = Drafter(config).to(getattr(torch, data["dtype"]))
    drafter.load_state_dict(load_file(folder / "model.safetensors"))
    return drafter
