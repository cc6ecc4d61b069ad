from __future__ import annotations

from collections.abc import Iterator

import prometheus_client
import pytest
from prometheus_client import CollectorRegistry

from sglang_dflash.speculative.metrics import RoundMetrics


@pytest.fixture
def registry(monkeypatch: pytest.MonkeyPatch) -> Iterator[CollectorRegistry]:
    """The counters of one test alone; prometheus_client registers a name once in a process."""
    registry = CollectorRegistry()
    for name in ("Counter", "Histogram"):
        made = getattr(prometheus_client, name)
        monkeypatch.setattr(
            prometheus_client, name, lambda *args, made=made, **kwargs: made(*args, registry=registry, **kwargs)
        )
    yield registry


def value(registry: CollectorRegistry, name: str, **labels: str) -> float | None:
    return registry.get_sample_value(f"sglang:dflash_{name}", {"model_name": "m", **labels})


def test_rounds_are_counted_with_the_width_that_they_began_with(registry: CollectorRegistry) -> None:
    metrics = RoundMetrics({"model_name": "m"}, max_depth=7)
    metrics.began(17)
    metrics.began(8)
    metrics.verified([2, 0, 7])
    metrics.verified([1])
    assert value(registry, "rounds_total", width="17") == value(registry, "rounds_total", width="8") == 1
    assert value(registry, "proposed_drafts_total") == 3 * 16 + 7
    assert value(registry, "accepted_drafts_sum") == 10
    assert value(registry, "accepted_drafts_bucket", le="0.0") == 1
    assert value(registry, "accepted_drafts_bucket", le="2.0") == 3


def test_an_acceptance_without_a_round_is_not_counted(registry: CollectorRegistry) -> None:
    metrics = RoundMetrics({"model_name": "m"}, max_depth=7)
    metrics.verified([3])
    assert value(registry, "proposed_drafts_total") == 0
