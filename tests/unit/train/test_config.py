from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from pydantic import ValidationError

from sglang_dflash.train.config import ConfigError, OutputConfig, TrainConfig, load_config


@pytest.fixture
def required(tmp_path: Path) -> list[str]:
    return [f"data.dump={tmp_path}", f"data.target={tmp_path}", "model.mask_token_id=7", "output.folder=run"]


def test_settings_alone_are_a_run(required: list[str], tmp_path: Path) -> None:
    config = load_config(None, required)
    assert config.data.dump == tmp_path
    assert config.output.folder == Path("run")
    assert (config.optim.lr, config.model.block_size, config.objective.sampled_vocab) == (6e-4, 8, None)
    assert (config.data.max_missing_fraction, config.optim.clip_norm, config.model.is_causal) == (0.0, 1.0, False)


def test_a_path_alone_is_the_output_folder(required: list[str], tmp_path: Path) -> None:
    expected = OutputConfig(folder=Path("elsewhere"), dtype="bfloat16")
    assert load_config(None, [*required[:3], "output=elsewhere", "output.dtype=bfloat16"]).output == expected
    path = tmp_path / "run.yaml"
    path.write_text("output: elsewhere")
    assert load_config(path, [*required[:3], "output.dtype=bfloat16"]).output == expected


def test_arguments_win_over_the_file(required: list[str], tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(
        f"data: {{dump: {tmp_path}, target: {tmp_path}}}\n"
        "model: {mask_token_id: 7, num_hidden_layers: 5}\n"
        "optim: {lr: 1e-3, weight_decay: 0.1}\n"
        "loop:\n"
        "output: {folder: run, dtype: bfloat16}\n"
    )
    assert load_config(path).optim.lr == 1e-3
    config = load_config(
        path, ["optim.lr=3e-4", "loop.max_minutes=2.5", "objective.sampled_vocab=100", "loop.resume=true"]
    )
    assert (config.optim.lr, config.optim.weight_decay, config.model.num_hidden_layers) == (3e-4, 0.1, 5)
    assert (config.loop.max_minutes, config.objective.sampled_vocab, config.loop.resume) == (2.5, 100, True)
    assert config.output.dtype == "bfloat16"
    assert load_config(path, ["output.dtype=null"]).output.dtype is None


@pytest.mark.parametrize(
    ("setting", "expected"),
    [
        ("optim.speed=1", "optim.speed is not a setting. Allowed here: lr, warmup_fraction, weight_decay, clip_norm"),
        ("optimizer.lr=1", "optimizer is not a setting. Allowed here: data, model, objective, optim, loop, output"),
        ("model.yarn.mscale=1", "model.yarn.mscale is not a setting. Allowed here: factor, original_max_position"),
        ("output.path=x", "output.path is not a setting. Allowed here: folder, dtype"),
        ("optim.lr=-1", "optim.lr: Input should be greater than 0 (given: -1)"),
        ("optim.lr=.inf", "optim.lr: Input should be a finite number (given: inf)"),
        ("loop.max_minutes=.nan", "loop.max_minutes: Input should be a finite number"),
        ("optim.lr=fast", "optim.lr: Input should be a valid number"),
        ("loop.epochs=1.5", "loop.epochs: Input should be a valid integer"),
        ("model.init=zero", "model.init: Input should be 'target' or 'random' (given: 'zero')"),
        ("model.block_size=1", "model.block_size: Input should be greater than or equal to 2"),
        ("model.head_dim=5", "model.head_dim: Input should be a multiple of 2"),
        ("model.mask_token_id=null", "model.mask_token_id: Input should be a valid integer"),
        ("loop.device=tpu", "loop.device: Input should be 'auto', 'cpu' or 'cuda'"),
        ("output.dtype=int8", "output.dtype: Input should be 'float32', 'bfloat16' or 'float16'"),
        ("data.dump=/no/such/dump", "data.dump /no/such/dump is not a directory"),
        (
            "model.yarn={factor: 4, original_max_position_embeddings: 64}",
            "model: yarn scales a given base: set rope_theta",
        ),
    ],
)
def test_errors_name_the_key_and_what_is_allowed(setting: str, expected: str, required: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(None, [*required, setting])
    assert expected in str(caught.value)


def test_all_problems_are_told_at_once(required: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(None, [*required[1:3], "optim.lr=0", "loop.seeds=1"])
    for expected in ("data.dump is required", "output is required", "optim.lr:", "loop.seeds is not a setting"):
        assert expected in str(caught.value)


@pytest.mark.parametrize("setting", ["optim.lr", "=3", "optim.=3", "optim..lr=3", ".lr=3", ""])
def test_a_setting_has_a_key_and_a_value(setting: str, required: list[str]) -> None:
    with pytest.raises(ConfigError, match=r"is not section\.key=value"):
        load_config(None, [*required, setting])


def test_a_value_has_no_keys(required: list[str]) -> None:
    with pytest.raises(ConfigError, match="lr is already the value 1, so it has no keys"):
        load_config(None, [*required, "optim.lr=1", "optim.lr.max=2"])


def test_what_is_not_yaml_is_an_error(required: list[str], tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    for text in ("optim: {lr: 1", "- a list"):
        path.write_text(text)
        with pytest.raises(ConfigError, match=r"run\.yaml"):
            load_config(path, required)
    with pytest.raises(ConfigError, match=r"missing\.yaml"):
        load_config(tmp_path / "missing.yaml", required)
    with pytest.raises(ConfigError, match="cannot be read as YAML"):
        load_config(None, [*required, "optim.lr={"])


def test_a_run_cannot_be_changed(configure: Callable[..., TrainConfig]) -> None:
    with pytest.raises(ValidationError):
        configure().optim.lr = 1.0  # type: ignore[misc]
