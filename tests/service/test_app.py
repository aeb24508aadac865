"""The service as a whole, without its ports: what a tick does for scrapes and for receivers of notifications."""

from __future__ import annotations

from itertools import zip_longest
from pathlib import Path

from service.simulated_batches import SECOND_NS, log_batches

from ncclscope_service.app import Service, ServiceSettings
from ncclscope_service.webhook import WebhookSettings
from ncclscope_simulator import SimulationConfig, parse_faults, write


def test_metrics_are_gathered_once_between_two_ticks() -> None:
    service = Service(ServiceSettings(version="0"))
    first = service.metrics()
    assert service.metrics() is first
    service.tick(1)
    assert service.metrics() is not first
    assert "ncclscope_tick_seconds" in service.metrics().samples


def test_a_hang_that_a_tick_finds_waits_for_its_receiver_and_is_exposed_with_its_culprit(tmp_path: Path) -> None:
    """From the logs alone, as they grow; nothing listens at the receiver's address, and nothing is sent here."""
    config = SimulationConfig(
        nodes=1, gpus=2, tp=2, pp=1, dp=1, iterations=30, capture="none", faults=parse_faults(["hang:rank=0,at=20"])
    )
    write(config, tmp_path)
    service = Service(ServiceSettings(version="0", webhooks=(WebhookSettings(url="http://hooks.example/secret"),)))
    for half_seconds, turn in enumerate(zip_longest(*log_batches(tmp_path, portions=20))):
        for batch in filter(None, turn):
            service.pipeline.feed(batch, agent="a", session="s", job="train")
        service.tick(config.start_ns + half_seconds * SECOND_NS // 2)
    assert service.metrics().samples["ncclscope_notifications_queued"].values.tolist() == [0]
    for seconds in (30, 31):
        service.tick(config.start_ns + seconds * SECOND_NS)
    samples = service.metrics().samples
    assert samples["ncclscope_notifications_queued"].labels == [("hooks.example",)]
    assert samples["ncclscope_notifications_queued"].values.tolist() == [1], "told once, though two ticks saw it"
    (culprit,) = samples["ncclscope_finding_info"].labels
    assert (culprit[0], culprit[1], culprit[5]) == ("train", "hang", "0")
    assert [(each.kind, each.ranks) for each in service.findings()] == [("hang", (0,))]
