"""A target small enough to train against in a second, and dumps of it that live in memory."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from sglang_dflash.dump.reader import MissingRowsError
from sglang_dflash.train.config import TrainConfig, load_config
from sglang_dflash.train.model import Drafter, DrafterConfig

VOCAB, HIDDEN, MASK, TAPS = 48, 32, 47, (1, 2)


@dataclass(frozen=True)
class FakeSample:
    rid: str
    token_ids: torch.Tensor
    hidden: torch.Tensor
    prompt_len: int


@dataclass
class FakeReader:
    """Dumped requests in memory; those in ``missing`` raise when loaded."""

    held: Sequence[FakeSample]
    missing: Sequence[str] = ()
    manifest: Any = field(
        default_factory=lambda: SimpleNamespace(
            layer_ids=TAPS, hidden_size=HIDDEN, vocab_size=VOCAB, num_layers=4, dtype="float32", id=b"\x07" * 16
        )
    )

    def samples(self) -> Sequence[FakeSample]:
        return self.held

    def load(self, ref: FakeSample) -> FakeSample:
        if ref.rid in self.missing:
            raise MissingRowsError(f"Request {ref.rid}: no record holds position 3.")
        return ref


def _samples(count: int, *, seed: int = 0) -> list[FakeSample]:
    """Requests whose every token follows from the one before it: t -> 5 t + 3 (mod 47).

    As in a real residual stream, features differ in size by orders of magnitude.
    """
    generator = torch.Generator().manual_seed(seed)
    size_F = torch.logspace(-1, 3, len(TAPS) * HIDDEN)
    feature_VF = torch.randn(VOCAB, len(TAPS) * HIDDEN, generator=generator) * size_F
    samples = []
    for number in range(count):
        length = int(torch.randint(12, 24, (1,), generator=generator))
        tokens = [int(torch.randint(MASK, (1,), generator=generator))]
        while len(tokens) < length:
            tokens.append((5 * tokens[-1] + 3) % MASK)
        token_ids = torch.tensor(tokens)
        samples.append(FakeSample(f"request-{number}", token_ids, feature_VF[token_ids], prompt_len=4))
    return samples


def _drafter(**changes: Any) -> Drafter:
    """A drafter with weights large enough for every part to matter."""
    sizes: dict[str, Any] = {
        "hidden_size": HIDDEN,
        "intermediate_size": 40,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "max_position_embeddings": 256,
        "vocab_size": VOCAB,
        "num_target_layers": 4,
        "target_layer_ids": TAPS,
        "block_size": 4,
        "mask_token_id": MASK,
        "is_causal": False,
    }
    drafter = Drafter(DrafterConfig(**{**sizes, **changes}))
    generator = torch.Generator().manual_seed(1)
    for name, parameter in drafter.named_parameters():
        mean = 1.0 if "norm" in name else 0.0
        parameter.data.normal_(mean, 0.3, generator=generator)
    return drafter


@pytest.fixture
def make_sample() -> Callable[..., FakeSample]:
    return FakeSample


@pytest.fixture
def make_reader() -> Callable[..., FakeReader]:
    return FakeReader


@pytest.fixture
def make_samples() -> Callable[..., list[FakeSample]]:
    return _samples


@pytest.fixture
def make_drafter() -> Callable[..., Drafter]:
    return _drafter


@pytest.fixture(scope="session")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A target's folder: what training reads of it, with random weights."""
    folder = tmp_path_factory.mktemp("target")
    config = {
        "hidden_size": HIDDEN,
        "intermediate_size": 40,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "max_position_embeddings": 256,
        "vocab_size": VOCAB,
        "tie_word_embeddings": True,
    }
    (folder / "config.json").write_text(json.dumps(config))
    generator = torch.Generator().manual_seed(2)
    shapes = {
        "self_attn.q_proj": (32, 32),
        "self_attn.k_proj": (16, 32),
        "self_attn.v_proj": (16, 32),
        "self_attn.o_proj": (32, 32),
        "mlp.gate_proj": (40, 32),
        "mlp.up_proj": (40, 32),
        "mlp.down_proj": (32, 40),
    }
    weights = {"model.embed_tokens.weight": torch.randn(VOCAB, HIDDEN, generator=generator)}
    for layer in range(4):
        for norm in ("input_layernorm", "post_attention_layernorm"):
            weights[f"model.layers.{layer}.{norm}.weight"] = torch.ones(HIDDEN)
        for name, shape in shapes.items():
            weights[f"model.layers.{layer}.{name}.weight"] = 0.1 * torch.randn(*shape, generator=generator)
    save_file(weights, folder / "model.safetensors")
    return folder


@pytest.fixture
def configure(target: Path, tmp_path: Path) -> Callable[..., TrainConfig]:
    """Builds a run over the small target from ``section.key=value`` settings."""
    (tmp_path / "dump").mkdir()

    def build(*settings: str) -> TrainConfig:
        base = [
            f"data.dump={tmp_path / 'dump'}",
            f"data.target={target}",
            f"output={tmp_path / 'run'}",
            f"model.mask_token_id={MASK}",
            "model.block_size=4",
            "data.anchors_per_sample=8",
            "data.holdout_fraction=0",
            "loop.device=cpu",
        ]
        return load_config(None, [*base, *settings])

    return build
