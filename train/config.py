"""Everything that a training run can be told, with every default, in one place.

A run is a YAML file of these sections, ``section.key=value`` arguments, or both (arguments win). Unknown sections and keys, and
values outside of what is allowed, are errors that name the key. The tapped layers are not here: they are what the dump holds.
Whether dump, target and run fit each other is judged where the dump is open (``loop``).
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator


class ConfigError(ValueError):
    """The run's configuration names something unknown or not allowed."""


class _Section(BaseModel):
    # Infinity would pass every lower bound below.
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


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


class YarnConfig(_Section):
    """YaRN scaling of the drafter's positions.

    Attributes:
        factor: how many times the original context is stretched.
        original_max_position_embeddings: the context that ``model.rope_theta`` was made for.
        beta_fast, beta_slow: rotations over the original context above which a frequency stays, and below which it is divided
            by ``factor``.
        amplitude: multiplies cos and sin. Engines disagree on their default (1.0 or 1 + 0.1 ln factor), so the exported config
            states it.
    """

    factor: float = Field(ge=1)
    original_max_position_embeddings: int = Field(ge=1)
    beta_fast: float = Field(default=32.0, gt=0)
    beta_slow: float = Field(default=1.0, gt=0)
    amplitude: float = Field(default=1.0, gt=0)


class ModelConfig(_Section):
    """The drafter. A size that is None is the target's; hidden and vocabulary size always are, so that its embedding fits.

    Attributes:
        block_size: rows of a block: the anchor and the masks.
        mask_token_id: the target's embedding row that stands for "to be drafted"; a token that never occurs in text.
        rope_theta: base of the rotary embedding; None takes the target's, which then must be unscaled.
        yarn: scaling of the rotary embedding; needs ``rope_theta``.
        is_causal: whether a block row sees only earlier rows of its block.
        init: ``target`` starts from the target's last layers, ``random`` from small normal values.
    """

    num_hidden_layers: int = Field(default=2, ge=1)
    block_size: int = Field(default=8, ge=2, le=64)
    mask_token_id: int = Field(ge=0)
    intermediate_size: int | None = Field(default=None, ge=1)
    num_attention_heads: int | None = Field(default=None, ge=1)
    num_key_value_heads: int | None = Field(default=None, ge=1)
    head_dim: int | None = Field(default=None, ge=2, multiple_of=2)
    rope_theta: float | None = Field(default=None, gt=1)
    yarn: YarnConfig | None = None
    is_causal: bool = False
    init: Literal["target", "random"] = "target"

    @model_validator(mode="after")
    def _yarn_has_a_base(self) -> ModelConfig:
        if self.yarn is not None and self.rope_theta is None:
            raise ValueError("yarn scales a given base: set rope_theta too")
        return self


class ObjectiveConfig(_Section):
    """Cross-entropy against the target's own next tokens.

    Attributes:
        gamma: slot j of a block weighs exp(-(j - 1) / gamma); later slots are reached less often.
        sampled_vocab: None takes the softmax over the whole vocabulary. A number takes it over the tokens that occur as labels
            plus that many others, drawn anew each step: several times cheaper on a CPU, but biased. The other tokens' share of
            the partition function is underestimated (loss and accuracy of the run look better than they are), and a token
            that is no label anywhere is pushed down only in the steps that draw it.
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
        max_minutes: end earlier, with the learning rate at its floor by then: wall clock of the steps, without reading the
            dump and measuring. None means epochs alone decide.
        samples_per_batch: requests in one optimiser step, at most.
        tokens_per_batch: rows of context in one optimiser step, padding included, at most; a longer request stands alone.
        checkpoint_every: optimiser steps between checkpoints; one is always written at the end and on SIGTERM.
        device: ``auto`` is cuda where there is one.
        resume: continue from the checkpoint in the output folder.
    """

    epochs: int = Field(default=6, ge=1)
    max_minutes: float | None = Field(default=None, gt=0)
    samples_per_batch: int = Field(default=8, ge=1)
    tokens_per_batch: int = Field(default=16384, ge=16)
    checkpoint_every: int = Field(default=200, ge=1)
    seed: int = Field(default=0, ge=0)
    device: Literal["auto", "cpu", "cuda"] = "auto"
    resume: bool = False


class OutputConfig(_Section):
    """What the run leaves behind. In a file or argument, ``output=FOLDER`` is short for ``output.folder=FOLDER``.

    Attributes:
        folder: receives the drafter, the checkpoint and metrics.jsonl.
        dtype: of the exported weights; None is the dump's, which is what the target was served in.
    """

    folder: Path
    dtype: Literal["float32", "bfloat16", "float16"] | None = None


class TrainConfig(_Section):
    """A whole run."""

    data: DataConfig
    model: ModelConfig
    objective: ObjectiveConfig = ObjectiveConfig()
    optim: OptimConfig = OptimConfig()
    loop: LoopConfig = LoopConfig()
    output: OutputConfig

    @model_validator(mode="after")
    def _paths_exist(self) -> TrainConfig:
        for name, path in (("data.dump", self.data.dump), ("data.target", self.data.target)):
            if not path.is_dir():
                raise ValueError(f"{name} {path} is not a directory")
        return self


def load_config(path: Path | None = None, overrides: Sequence[str] = ()) -> TrainConfig:
    """Read a YAML file and apply ``section.key=value`` overrides; without a file the overrides are the run.

    Raises:
        ConfigError: names the key, what was given and what is allowed.
    """
    data: Any = {}
    if path is not None:
        try:
            data = yaml.safe_load(path.read_text()) or {}
        except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
            raise ConfigError(f"{path} cannot be read as YAML: {error}") from error
        if not isinstance(data, dict):
            raise ConfigError(f"{path} must be a mapping of sections ({', '.join(TrainConfig.model_fields)}).")
    # A section without keys, as when all of them are commented out, reads as None.
    data = {section: {} if keys is None else keys for section, keys in data.items()}
    if isinstance(data.get("output"), str):
        data["output"] = {"folder": data["output"]}
    for override in overrides:
        _apply(data, override)
    try:
        return TrainConfig.model_validate(data)
    except ValidationError as error:
        lines = [_problem(item) for item in error.errors()]
        raise ConfigError("The training configuration is not valid.\n  " + "\n  ".join(lines)) from None


def _apply(data: dict[str, Any], override: str) -> None:
    key, separator, text = override.partition("=")
    *sections, name = ("output.folder" if key == "output" else key).split(".")
    if not separator or not all([*sections, name]):
        raise ConfigError(f"{override!r} is not section.key=value (for example optim.lr=3e-4).")
    try:
        value = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ConfigError(f"{override!r}: the value cannot be read as YAML: {error}") from error
    for section in sections:
        if data.get(section) is None:
            data[section] = {}
        data = data[section]
        if not isinstance(data, dict):
            raise ConfigError(f"{override!r}: {section} is already the value {data!r}, so it has no keys.")
    # YAML 1.1 reads 3e-4 as text; pydantic turns it into the field's number.
    data[name] = value


def _problem(item: Any) -> str:
    key = ".".join(str(part) for part in item["loc"]) or "run"
    if item["type"] == "extra_forbidden":
        section = _section(item["loc"][:-1])
        return f"{key} is not a setting. Allowed here: {', '.join(section.model_fields)}"
    if item["type"] == "missing":
        return f"{key} is required"
    # A validator's own message says what it refuses; its input would be the whole section.
    given = "" if item["type"] == "value_error" else f" (given: {item['input']!r})"
    return f"{key}: {item['msg'].removeprefix('Value error, ')}{given}"


def _section(parts: tuple[Any, ...]) -> type[BaseModel]:
    section: Any = TrainConfig
    for part in parts:
        annotation = section.model_fields[part].annotation
        # An optional section is ``Section | None``.
        section = annotation if isinstance(annotation, type) else annotation.__args__[0]
    return section
