"""Everything that a training run can be told, with every default, in one place.

A run is a YAML file of these sections, ``section.key=value`` arguments, or both (arguments win). Unknown sections and keys are
errors. The tapped layers are not here: they are what the dump holds.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator


class ConfigError(ValueError):
    """The run's configuration names something unknown or not allowed."""


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class DataConfig(_Section):
    """Where rows come from and how anchors are drawn from them.

    Attributes:
        dump: directory that ``sglang_dflash.dump`` wrote.
        target: Hugging Face folder of the target; its embedding and head are borrowed, frozen.
        anchors_per_sample: draft blocks drawn from a request in an epoch, at most.
        max_length: rows of a request that are used, from its start.
        max_missing_fraction: share of requests whose rows may be missing before the run is refused.
        holdout_fraction: share of requests, chosen by a hash of their id, that only measure.
    """

    dump: Path
    target: Path
    anchors_per_sample: int = Field(default=64, ge=1)
    max_length: int = Field(default=4096, ge=16)
    max_missing_fraction: float = Field(default=0.0, ge=0, le=1)
    holdout_fraction: float = Field(default=0.05, ge=0, lt=1)


class ModelConfig(_Section):
    """The drafter. Sizes that are not here are the target's, so that its embedding and head fit.

    Attributes:
        block_size: rows of a block: the anchor and the masks.
        mask_token_id: the target's embedding row that stands for "to be drafted"; a token that never occurs in text.
        intermediate_size: of the MLP; the target's where None.
        is_causal: whether a block row sees only earlier rows of its block.
        init: ``target`` starts from the target's last layers, ``random`` from small normal values.
    """

    num_hidden_layers: int = Field(default=2, ge=1)
    block_size: int = Field(default=8, ge=2, le=64)
    mask_token_id: int = Field(ge=0)
    intermediate_size: int | None = Field(default=None, ge=1)
    is_causal: bool = False
    init: Literal["target", "random"] = "target"


class ObjectiveConfig(_Section):
    """Cross-entropy against the target's own next tokens.

    Attributes:
        gamma: slot j of a block weighs exp(-(j - 1) / gamma); later slots are reached less often.
        sampled_vocab: None takes the softmax over the whole vocabulary. A number takes it over the tokens that occur as labels
            plus that many others, drawn anew each step: several times cheaper on a CPU, and blind to a token that never occurs.
    """

    gamma: float = Field(default=4.0, gt=0)
    sampled_vocab: int | None = Field(default=None, ge=1)


class OptimConfig(_Section):
    """AdamW with linear warm-up and a cosine to zero."""

    lr: float = Field(default=6e-4, gt=0)
    warmup_fraction: float = Field(default=0.04, ge=0, lt=1)
    weight_decay: float = Field(default=0.0, ge=0)
    clip_norm: float = Field(default=1.0, gt=0)


class LoopConfig(_Section):
    """How long and on what.

    Attributes:
        epochs: passes over the requests.
        max_minutes: end earlier, with the learning rate at its floor by then. None means epochs alone decide.
        samples_per_batch: requests in one optimiser step.
        checkpoint_every: optimiser steps between checkpoints; one is always written at the end and on SIGTERM.
        device: ``auto`` is cuda where there is one.
        resume: continue from the checkpoint in the output folder.
    """

    epochs: int = Field(default=6, ge=1)
    max_minutes: float | None = Field(default=None, gt=0)
    samples_per_batch: int = Field(default=8, ge=1)
    checkpoint_every: int = Field(default=200, ge=1)
    seed: int = 0
    device: Literal["auto", "cpu", "cuda"] = "auto"
    resume: bool = False


class TrainConfig(_Section):
    """A whole run. ``output`` receives the drafter, the checkpoint and metrics.jsonl."""

    data: DataConfig
    model: ModelConfig
    objective: ObjectiveConfig = ObjectiveConfig()
    optim: OptimConfig = OptimConfig()
    loop: LoopConfig = LoopConfig()
    output: Path

    @model_validator(mode="after")
    def _paths_exist(self) -> TrainConfig:
        for name, path in (("data.dump", self.data.dump), ("data.target", self.data.target)):
            if not path.is_dir():
                raise ValueError(f"{name} {path} is not a directory")
        return self


def load_config(path: Path | None = None, overrides: list[str] | None = None) -> TrainConfig:
    """Read a YAML file and apply ``section.key=value`` overrides.

    Raises:
        ConfigError: names the key, what was given and what is allowed.
    """
    data: dict[str, Any] = {}
    if path is not None:
        try:
            data = yaml.safe_load(path.read_text()) or {}
        except (OSError, yaml.YAMLError) as error:
            raise ConfigError(f"{path} cannot be read as YAML: {error}") from error
        if not isinstance(data, dict):
            raise ConfigError(f"{path} must be a mapping of sections ({', '.join(TrainConfig.model_fields)}).")
    for override in overrides or []:
        _apply(data, override)
    try:
        return TrainConfig.model_validate(data)
    except ValidationError as error:
        lines = [f"{'.'.join(str(part) for part in item['loc']) or 'run'}: {_problem(item)}" for item in error.errors()]
        raise ConfigError("The training configuration is not valid.\n  " + "\n  ".join(lines)) from None


def _apply(data: dict[str, Any], override: str) -> None:
    key, separator, text = override.partition("=")
    if not separator or not key:
        raise ConfigError(f"{override!r} is not section.key=value (for example optim.lr=3e-4).")
    *sections, name = key.split(".")
    for section in sections:
        data = data.setdefault(section, {})
        if not isinstance(data, dict):
            raise ConfigError(f"{override!r}: {section} is a value, not a section.")
    value = yaml.safe_load(text)
    # YAML 1.1 reads 3e-4 as text; pydantic turns it into the field's number.
    data[name] = value


def _problem(item: Any) -> str:
    given = "" if item["type"] == "missing" else f" (given: {item['input']!r})"
    return f"{item['msg']}{given}"
