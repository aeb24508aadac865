"""The service as a whole: what a tick does for scrapes and for receivers of notifications, and how it starts."""

from __future__ import annotations

import time
from itertools import zip_longest
from pathlib import Path
from typing import Any

import anyio
import httpx
import pytest
from service.log_batches import rank_batches
from service.simulated_batches import SECOND_NS, log_batches

from ncclscope_service.app import Service, ServiceSettings
from ncclscope_service.serve.api_table import ChangeRequest
from ncclscope_service.serve.listen import ListenSettings
from ncclscope_service.serve.notify import ReceiverSettings
from ncclscope_simulator import SimulationConfig, parse_faults, write
from ncclscope_wire.errors import ConfigError


def test_metrics_are_gathered_once_between_two_ticks() -> None:
    service = Service(ServiceSettings(version="0"))
    first = service.views.metrics()
    assert service.views.metrics() is first
    service.tick(1)
    assert service.views.metrics() is not first
    assert "ncclscope_tick_seconds" in service.views.metrics().samples


def test_lines_are_counted_when_they_come_and_not_only_by_the_next_tick(monkeypatch: pytest.MonkeyPatch) -> None:
    service = Service(ServiceSettings(version="0"))

    def feed(rank: int, numbers: range) -> None:
        log, _ = rank_batches(rank, numbers, pid=10 + rank)
        service.pipeline.ingest_batch(log, agent="a", session=f"from {numbers.start}", job="j")

    def counted(at_seconds: float) -> float:
        monkeypatch.setattr(time, "monotonic", lambda: at_seconds)
        return float(service.views.metrics().samples["ncclscope_operations"].values.sum())

    for rank in (0, 1):
        feed(rank, range(3))
    service.tick(1)
    assert counted(1) == 6
    feed(0, range(3, 5))
    assert service.pipeline.store.operations.next_id == 6, "they wait to be numbered"
    assert counted(2) == 8
    feed(1, range(3, 5))
    assert counted(2.1) == 8, "metrics are not gathered for each who asks"
    assert counted(3) == 10
    service.tick(2)
    assert counted(3) == service.pipeline.store.operations.next_id == 10


def test_a_hang_that_a_tick_finds_waits_for_its_receiver_and_is_exposed_with_its_culprit(tmp_path: Path) -> None:
    """From the logs alone, as they grow; nothing listens at the receiver's address, and nothing is sent here."""
    config = SimulationConfig(
        nodes=1, gpus=2, tp=2, pp=1, dp=1, iterations=30, capture="none", faults=parse_faults(["hang:rank=0,at=20"])
    )
    write(config, tmp_path)
    service = Service(ServiceSettings(version="0", receivers=(ReceiverSettings(url="http://hooks.example/secret"),)))
    for half_seconds, turn in enumerate(zip_longest(*log_batches(tmp_path, portions=20))):
        for batch in filter(None, turn):
            service.pipeline.ingest_batch(batch, agent="a", session="s", job="train")
        service.tick(config.start_ns + half_seconds * SECOND_NS // 2)
    assert service.views.metrics().samples["ncclscope_notifications_queued"].values.tolist() == [0]
    for seconds in range(10, 32):
        service.tick(config.start_ns + seconds * SECOND_NS)
    samples = service.views.metrics().samples
    assert samples["ncclscope_notifications_queued"].labels == [("hooks.example",)]
    assert samples["ncclscope_notifications_queued"].values.tolist() == [1], "told once, though several ticks saw it"
    (culprit,) = samples["ncclscope_finding_info"].labels
    assert (culprit[0], culprit[1], culprit[3]) == ("train", "hang", "0")
    assert [(each.kind, each.ranks) for each in service.views.findings()] == [("hang", (0,))]


@pytest.mark.asyncio
async def test_a_service_is_ready_when_its_state_is_restored_and_goes_on_where_it_was(tmp_path: Path) -> None:
    settings = ServiceSettings(version="0", agents=ListenSettings(port=0), http_port=0, data=tmp_path)
    for ticks_before in (0, 1):
        service = Service(settings)
        assert service.views.is_ready() == (False, "the agents' port is not open yet")
        async with anyio.create_task_group() as tasks:
            await tasks.start(service.run)
            assert service.views.is_ready()[0]
            assert service.pipeline.store.strings.values == ["met before"] * ticks_before
            service.pipeline.store.strings.index_of("met before")
            tasks.cancel_scope.cancel()
        service.finish(1)


def test_thresholds_are_read_again_when_asked_for_and_wrong_ones_change_nothing() -> None:
    given: list[dict[str, float]] = [{"hang.rest_seconds": 60.0}]

    def read() -> dict[str, float]:
        if not given:
            raise ConfigError("there is no threshold 'x'")
        return given.pop()

    service = Service(ServiceSettings(version="0", read_thresholds=read))
    for _ in range(2):
        service.reload_thresholds()
        assert service.pipeline.settings.thresholds == {"hang.rest_seconds": 60.0}
    service.views.change_settings(ChangeRequest(values={"hang.rest_seconds": 90.0}, by="ann"))
    (rest,) = [each for each in service.views.settings().thresholds if each.name == "hang.rest_seconds"]
    assert (rest.started, rest.changed, rest.default) == (60.0, 90.0, 120.0)
    assert [(each.by, each.value) for each in service.views.settings().changes] == [("ann", 90.0)]


@pytest.mark.asyncio
async def test_what_a_person_changes_over_http_is_there_after_a_restart(tmp_path: Path) -> None:
    settings = ServiceSettings(version="0", agents=ListenSettings(port=0), http_port=0, data=tmp_path)
    mute = {"action": "mute", "kind": "hang", "job": "llama-*", "seconds": 3600, "by": "ann", "note": "known"}
    marks: list[Any] = []
    thresholds: list[Any] = []
    for is_first in (True, False):
        service = Service(settings)
        async with anyio.create_task_group() as tasks:
            _, port = await tasks.start(service.run)
            async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=60) as client:
                if is_first:
                    assert (await client.post("/api/findings/mark", json=mute)).status_code == 200
                    changes = {"values": {"hang.rest_seconds": 300}, "by": "bob"}
                    assert (await client.post("/api/settings/change", json=changes)).status_code == 200
                marks.append((await client.get("/api/findings/marks")).json())
                thresholds.append((await client.get("/api/settings")).json())
            tasks.cancel_scope.cancel()
        service.finish(time.time_ns())
    assert [len(each["mutes"]) for each in marks] == [1, 1]
    assert marks[0] == marks[1]
    assert thresholds[0] == thresholds[1]
    assert [(each["by"], each["value"]) for each in thresholds[1]["changes"]] == [("bob", 300)]
