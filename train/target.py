"""What a drafter borrows of its target, read from the target's Hugging Face folder: sizes, embedding, head, last layers."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from sglang_dflash.train.model import Drafter

# Where checkpoints keep a language model's tensors: text-only ones, Kimi's, Qwen's multimodal ones.
_BODY_AND_HEAD = (
    ("model.", "lm_head.weight"),
    ("language_model.model.", "language_model.lm_head.weight"),
    ("model.language_model.", "lm_head.weight"),
)


class TargetError(ValueError):
    """The target's folder lacks something that training needs."""


@dataclass(frozen=True)
class Target:
    """A target's text config and where its tensors are."""

    folder: Path
    config: dict[str, Any]
    file_of: dict[str, Path]

    def tensor(self, name: str) -> torch.Tensor:
        """One tensor by its checkpoint name, in fp32.

        Raises:
            TargetError: the checkpoint has no such tensor.
        """
        if name not in self.file_of:
            raise TargetError(f"{self.folder} has no tensor {name}.")
        with safe_open(self.file_of[name], framework="pt") as file:
            return file.get_tensor(name).float()

    def embedding_and_head(self) -> tuple[torch.Tensor, torch.Tensor]:
        """``[vocabulary, hidden]`` each; the same tensor where they are tied."""
        embedding_VH = self.tensor(f"{self.body}embed_tokens.weight")
        head = dict(_BODY_AND_HEAD)[self.body]
        tied = self.config.get("tie_word_embeddings", head not in self.file_of)
        return embedding_VH, embedding_VH if tied else self.tensor(head)

    @property
    def body(self) -> str:
        """What the names of the language model's tensors begin with.

        Raises:
            TargetError: the checkpoint has no embedding under any known name.
        """
        for body, _ in _BODY_AND_HEAD:
            if f"{body}embed_tokens.weight" in self.file_of:
                return body
        known = ", ".join(f"{body}embed_tokens.weight" for body, _ in _BODY_AND_HEAD)
        raise TargetError(f"{self.folder} has none of the tensors {known}; this trainer knows no other names.")

    @property
    def rope_theta(self) -> float:
        """Base of the target's rotary embedding.

        Raises:
            TargetError: the target scales its positions; the drafter would have to be told how.
        """
        rope = self.config.get("rope_parameters") or {}
        by_layer = sorted(name for name, value in rope.items() if isinstance(value, dict))
        kind = "/".join(by_layer) or rope.get("rope_type", "default")
        if kind != "default" or self.config.get("rope_scaling"):
            raise TargetError(f"{self.folder} has rope type {kind!r}; this trainer knows the default one only.")
        return float(rope.get("rope_theta", self.config.get("rope_theta", 10000.0)))


def open_target(folder: Path) -> Target:
    """Index a target's folder.

    Raises:
        TargetError: it has no config.json or no safetensors.
    """
    try:
        config = json.loads((folder / "config.json").read_text())
    except (OSError, ValueError) as error:
        raise TargetError(f"{folder} is not a Hugging Face model folder: {error}") from error
    file_of: dict[str, Path] = {}
    for path in sorted(folder.glob("*.safetensors")):
        try:
            with safe_open(path, framework="pt") as file:
                file_of.update(dict.fromkeys(file.keys(), path))
        except (SafetensorError, OSError) as error:
            raise TargetError(f"{path} cannot be read: {error}. Fetch the file again.") from error
    if not file_of:
        raise TargetError(f"{folder} has no *.safetensors files.")
    return Target(folder, config.get("text_config", config), file_of)


def copy_last_layers(drafter: Drafter, target: Target) -> None:
    """Start the drafter's layers from the target's last ones, where every shape fits.

    Raises:
        TargetError: a tensor is missing or of another shape; suggests a random start.
    """
    first = int(target.config["num_hidden_layers"]) - len(drafter.layers)
    for index, layer in enumerate(drafter.layers):
        for name, parameter in layer.named_parameters():
            if name.endswith(("q_norm.weight", "k_norm.weight")):
                continue
            source = target.tensor(f"{target.body}layers.{first + index}.{name}")
            if source.shape != parameter.shape:
                raise TargetError(
                    f"The target's {name} has shape {tuple(source.shape)}, the drafter's {tuple(parameter.shape)}; set "
                    "model.init=random."
                )
            parameter.data.copy_(source)
