from __future__ import annotations

import json
import logging
import math
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from safetensors import safe_open

from sglang_dflash.dump.record import Kind, Record, prefix_hashes
from sglang_dflash.dump.store import Manifest, SegmentWriter
from sglang_dflash.train import checkpoint, loop
from sglang_dflash.train.checkpoint import CheckpointError
from sglang_dflash.train.config import TrainConfig
from sglang_dflash.train.data import DataError
from sglang_dflash.train.export import load_drafter
from sglang_dflash.train.loop import ConfigMismatchError, DivergedError, learning_rate_factor, train
from sglang_dflash.train.target import TargetError

Configure = Callable[..., TrainConfig]
Make = Callable[..., Any]


def metrics(config: TrainConfig) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (config.output.folder / "metrics.jsonl").read_text().splitlines()]


def losses(config: TrainConfig) -> list[float]:
    return [line["loss"] for line in metrics(config)]


@pytest.mark.parametrize("settings", [[], ["objective.sampled_vocab=8", "model.init=random", "model.is_causal=true"]])
def test_a_rule_is_learnt(settings: list[str], configure: Configure, make_samples: Make, make_reader: Make) -> None:
    config = configure("loop.epochs=25", "optim.lr=5e-3", "data.holdout_fraction=0.2", *settings)
    result = train(config, reader=make_reader(make_samples(40)), progress=False)
    lines = metrics(config)
    assert result.steps == len(lines) and lines[0]["loss"] > 3 > 1 > lines[-1]["loss"] == result.final_loss
    # Blocks of 4 accept three drafts at best; untrained, tau is 1.0.
    assert result.seen.tau > 2.5
    assert result.held_out is not None and result.held_out.tau > 2, "the rule holds for requests that were never seen"
    assert (result.missing, result.interrupted) == ((), False)
    assert lines[-1]["tau"] > 2.5 and len(lines[-1]["slot_accuracy"]) == 3
    assert lines[-1]["lr"] < 1e-3 * config.optim.lr, "the cosine ends at zero"


def test_the_export_is_what_was_measured(configure: Configure, make_samples: Make, make_reader: Make) -> None:
    reader = make_reader(make_samples(8))
    reader.manifest.dtype = "bfloat16"
    config = configure("loop.epochs=2")
    result = train(config, reader=reader, progress=False)
    assert result.drafter == config.output.folder / "drafter"
    drafter = load_drafter(result.drafter)
    assert drafter.fc.weight.dtype == torch.bfloat16, "the dump's dtype is what the target was served in"
    assert drafter.config.target_layer_ids == (1, 2) and drafter.config.num_target_layers == 4
    with safe_open(result.drafter / "model.safetensors", framework="pt") as file:
        provenance = file.metadata()
    assert provenance["dump"] == "07" * 16 and provenance["steps"] == str(result.steps)
    assert json.loads(provenance["recipe"])["optim"]["lr"] == config.optim.lr
    wide = configure("loop.epochs=2", "output.dtype=float32")
    assert load_drafter(train(wide, reader=reader, progress=False).drafter).fc.weight.dtype == torch.float32


def test_the_export_drafts_what_was_trained(
    configure: Configure, make_samples: Make, make_reader: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Serving gives raw taps: the scale that training put before fc must be in the exported weights."""
    samples, trained = make_samples(8), []
    real_save = loop._save

    def save_and_draft(run: Any, step: int) -> None:
        real_save(run, step)
        trained.append(run.drafter.context(samples[0].hidden[None]))

    monkeypatch.setattr(loop, "_save", save_and_draft)
    result = train(configure("loop.epochs=2"), reader=make_reader(samples), progress=False)
    served = load_drafter(result.drafter).context(samples[0].hidden[None])
    for ours, theirs in zip(trained[-1], served, strict=True):
        # fp32; the scale multiplies the taps on one side and the weights on the other.
        torch.testing.assert_close(theirs, ours, rtol=1e-3, atol=1e-4)


def test_a_resumed_run_is_the_uninterrupted_one_to_the_bit(
    configure: Configure, make_samples: Make, make_reader: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    reader = make_reader(make_samples(10))
    settings = ["loop.epochs=3", "loop.samples_per_batch=4", "objective.sampled_vocab=8", "loop.checkpoint_every=3"]
    whole = configure(*settings, "output.folder=" + str(configure().output.folder) + "-whole")
    expected = train(whole, reader=reader, progress=False)
    assert expected.steps == 9
    config = configure(*settings)
    real_step = loop._step

    def step_and_die(run: Any, batch: Any, step: int, share: float) -> dict[str, Any]:
        if step == 5:
            raise MemoryError
        return real_step(run, batch, step, share)

    with monkeypatch.context() as patch:
        patch.setattr(loop, "_step", step_and_die)
        with pytest.raises(MemoryError):
            train(config, reader=reader, progress=False)
    assert len(losses(config)) == 5, "two of them behind the checkpoint at 3"
    result = train(configure(*settings, "loop.resume=true"), reader=reader, progress=False)
    assert [line["step"] for line in metrics(config)] == list(range(1, 10))
    assert losses(config) == losses(whole)
    with (
        safe_open(result.drafter / "model.safetensors", "pt") as ours,
        safe_open(expected.drafter / "model.safetensors", "pt") as theirs,
    ):
        assert all(torch.equal(ours.get_tensor(name), theirs.get_tensor(name)) for name in theirs.keys())  # noqa: SIM118
    again = train(configure(*settings, "loop.resume=true"), reader=reader, progress=False)
    assert again.steps == 9 and math.isnan(again.final_loss), "nothing is left to do"
    assert losses(config) == losses(whole)


def test_only_the_same_run_is_resumed(configure: Configure, make_samples: Make, make_reader: Make) -> None:
    with pytest.raises(CheckpointError, match="holds no checkpoint"):
        train(configure("loop.resume=true"), reader=make_reader(make_samples(4)), progress=False)
    train(configure("loop.epochs=1"), reader=make_reader(make_samples(4)), progress=False)
    with pytest.raises(CheckpointError, match=r"optim\.lr: 0\.0006 there, 0\.001 here"):
        train(
            configure("loop.epochs=1", "loop.resume=true", "optim.lr=1e-3"),
            reader=make_reader(make_samples(4)),
            progress=False,
        )
    with pytest.raises(CheckpointError, match=r"dump: '4 requests, \w+' there, '5 requests, \w+' here"):
        train(configure("loop.epochs=1", "loop.resume=true"), reader=make_reader(make_samples(5)), progress=False)


def test_a_fresh_run_replaces_the_one_before_and_says_so(
    configure: Configure, make_samples: Make, make_reader: Make, caplog: pytest.LogCaptureFixture
) -> None:
    train(configure("loop.epochs=3"), reader=make_reader(make_samples(4)), progress=False)
    assert "Starting anew" not in caplog.text
    config = configure("loop.epochs=1")
    with caplog.at_level(logging.WARNING):
        result = train(config, reader=make_reader(make_samples(4)), progress=False)
    assert "Starting anew" in caplog.text and "checkpoint-3" in caplog.text
    assert len(metrics(config)) == result.steps == 1
    assert checkpoint.find(config.output.folder) == config.output.folder / "checkpoint-1"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_checkpoints_and_leaves(
    number: signal.Signals, configure: Configure, make_samples: Make, make_reader: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    config, reader = configure("loop.epochs=4"), make_reader(make_samples(8))
    real_step, before = loop._step, signal.getsignal(number)

    def step_and_signal(run: Any, batch: Any, step: int, share: float) -> dict[str, Any]:
        if step == 1:
            os.kill(os.getpid(), number)
            assert signal.getsignal(number) is before, "a second signal acts as if there were no handler"
        return real_step(run, batch, step, share)

    with monkeypatch.context() as patch:
        patch.setattr(loop, "_step", step_and_signal)
        result = train(config, reader=reader, progress=False)
    assert (result.interrupted, result.steps) == (True, 2)
    assert signal.getsignal(number) is before
    assert checkpoint.find(config.output.folder) == config.output.folder / "checkpoint-2"
    assert load_drafter(result.drafter).config.block_size == 4
    resumed = train(configure("loop.epochs=4", "loop.resume=true"), reader=reader, progress=False)
    assert (resumed.interrupted, resumed.steps) == (False, 4)


def test_training_works_outside_the_main_thread(configure: Configure, make_samples: Make, make_reader: Make) -> None:
    results: list[Any] = []
    config, reader = configure("loop.epochs=1"), make_reader(make_samples(4))
    thread = threading.Thread(target=lambda: results.append(train(config, reader=reader, progress=False)))
    thread.start()
    thread.join()
    assert results[0].steps == 1


def test_max_minutes_ends_the_run_with_a_low_rate(configure: Configure, make_samples: Make, make_reader: Make) -> None:
    config = configure("loop.epochs=3000", "loop.max_minutes=0.02", "loop.checkpoint_every=3000")
    result = train(config, reader=make_reader(make_samples(4)), progress=False)
    rates = [line["lr"] for line in metrics(config)]
    assert 3 < result.steps < 3000
    # The last step begins within one step's time of the deadline.
    assert max(rates) > 0.5 * config.optim.lr and rates[-1] < 0.2 * max(rates)
    assert not result.interrupted


def test_the_schedule_warms_up_and_decays() -> None:
    factors = [learning_rate_factor(share / 100, 0.1) for share in range(101)]
    assert factors[0] == 1e-3 and factors[5] == pytest.approx(0.5) and factors[10] == 1.0
    assert factors[:11] == sorted(factors[:11]) and factors[10:] == sorted(factors[10:], reverse=True)
    assert factors[100] == pytest.approx(0.0) and factors[55] == pytest.approx(0.5)
    assert learning_rate_factor(0.0, 0.0) == 1.0


def test_missing_requests_are_in_the_result(configure: Configure, make_samples: Make, make_reader: Make) -> None:
    reader = make_reader(make_samples(10), missing=["request-2"])
    with pytest.raises(DataError, match="1 of 10 requests in the dump miss rows"):
        train(configure(), reader=reader, progress=False)
    result = train(configure("data.max_missing_fraction=0.1", "loop.epochs=1"), reader=reader, progress=False)
    assert result.missing == ("request-2",)


@pytest.mark.parametrize("name", ["hidden_size", "vocab_size", "num_layers"])
def test_another_targets_dump_is_refused(
    name: str, configure: Configure, make_samples: Make, make_reader: Make
) -> None:
    reader = make_reader(make_samples(4))
    setattr(reader.manifest, name, 96)
    with pytest.raises(ConfigMismatchError, match=r"The dump's target has \w+ 96, .* Give data\.target the model"):
        train(configure(), reader=reader, progress=False)


def test_shapes_of_its_own(configure: Configure, make_samples: Make, make_reader: Make) -> None:
    own = ["num_attention_heads=6", "num_key_value_heads=3", "head_dim=8", "intermediate_size=56", "rope_theta=500"]
    own += ["yarn.factor=4", "yarn.original_max_position_embeddings=32", "yarn.amplitude=1.2"]
    settings = [f"model.{setting}" for setting in own]
    with pytest.raises(TargetError, match=r"set model\.init=random"):
        train(configure(*settings), reader=make_reader(make_samples(4)), progress=False)
    result = train(configure(*settings, "model.init=random"), reader=make_reader(make_samples(4)), progress=False)
    config = load_drafter(result.drafter).config
    assert (config.num_attention_heads, config.num_key_value_heads, config.head_dim) == (6, 3, 8)
    assert (config.intermediate_size, config.rope_theta) == (56, 500.0)
    assert config.yarn is not None and (config.yarn.factor, config.yarn.amplitude) == (4.0, 1.2)


def test_a_diverged_run_keeps_its_last_good_checkpoint(
    configure: Configure, make_samples: Make, make_sample: Make, make_reader: Make
) -> None:
    samples = make_samples(4)
    config = configure(
        "loop.epochs=4", "loop.samples_per_batch=1", "loop.checkpoint_every=1", "model.num_hidden_layers=1"
    )
    last = samples[3]
    samples[3] = make_sample(last.rid, last.token_ids, torch.full_like(last.hidden, torch.inf), last.prompt_len)
    with pytest.raises(DivergedError, match=r"The loss of step \d+ is nan. Lower optim\.lr \(0\.0006\)"):
        train(config, reader=make_reader(samples), progress=False)


def test_a_real_dump_is_trained_on(configure: Configure, make_samples: Make) -> None:
    config = configure("loop.epochs=2")
    manifest = Manifest(
        architecture="LlamaForCausalLM",
        config_hash="00",
        vocab_size=48,
        num_layers=4,
        hidden_size=32,
        layer_ids=(1, 2),
        dtype="float32",
        quantization=None,
        kv_cache_dtype="float32",
        sglang_version="0.5.23",
    )
    with SegmentWriter(config.data.dump, manifest, segment_bytes=1 << 20) as writer:
        for sample in make_samples(6):
            token_ids, rows = sample.token_ids.numpy().astype("int32"), sample.hidden.numpy()
            *_, last = prefix_hashes(manifest.id, token_ids[:4])
            writer.append(Record(Kind.PREFILL, sample.rid, 0, manifest.id, token_ids[:4], rows[:4].tobytes()))
            writer.append(Record(Kind.DECODE, sample.rid, 4, last, token_ids[4:], rows[4:].tobytes()))
    result = train(config, progress=False)
    assert result.steps == 2 and result.missing == () and math.isfinite(result.final_loss)


def test_the_progress_bar_shows_loss_tau_and_speed(
    configure: Configure, make_samples: Make, make_reader: Make, capsys: pytest.CaptureFixture[str]
) -> None:
    train(configure("loop.epochs=1"), reader=make_reader(make_samples(4)))
    shown = capsys.readouterr().err
    assert all(part in shown for part in ("1/1", "loss ", "tau ", "tokens/s"))


def test_training_never_imports_sglang() -> None:
    script = (
        "import sys, sglang_dflash.train.loop\n"
        "assert not [name for name in sys.modules if name.split('.')[0] in ('sglang', 'transformers')]\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
