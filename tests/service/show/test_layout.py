"""Hosts, GPUs and groups of a job."""

from __future__ import annotations

from dataclasses import replace

import pytest
from service import fake_service as fake

from ncclscope_service.intake.aliases import Aliases
from ncclscope_service.show import layout
from ncclscope_service.show.health import ServiceHealth
from ncclscope_service.show.layout import LayoutView, layout_view
from ncclscope_service.show.overview import make_overview
from ncclscope_service.store.tables import Store


@pytest.fixture
def store() -> Store:
    return fake.FakeService().store(fake.NOW_NS)


def view_of(store: Store) -> LayoutView:
    return layout_view(fake.asked_of(store))


def test_every_rank_is_on_its_host_with_its_gpu(store: Store) -> None:
    view = view_of(store)
    assert [host.ranks for host in view.hosts] == [tuple(range(8 * node, 8 * node + 8)) for node in range(8)]
    assert (view.hosts[4].name, view.hosts_known) == ("gpu-node04", 8)
    assert all(host.gpus == tuple(range(8)) for host in view.hosts)


def test_every_group_of_two_ranks_is_there_with_the_efficiency_that_the_overview_shows(store: Store) -> None:
    view = view_of(store)
    health = ServiceHealth(version="1")
    overview = make_overview(store, aliases=Aliases(), agents=[], health=health, now_ns=fake.NOW_NS)
    shown = {each.alias: each for each in overview.jobs[0].communicators}
    assert {each.alias for each in view.groups} >= set(shown)
    for group in view.groups:
        own = shown[group.alias]
        assert tuple(sorted(group.ranks)) == own.ranks
        ratio = own.busbw / own.expected if own.busbw is not None and own.expected else None
        assert group.efficiency == (None if ratio is None else pytest.approx(ratio, rel=1e-3))
    assert {each.alias for each in view.groups if each.efficiency is not None and each.efficiency < 0.65} == {"dp-35"}


def test_ranks_without_a_number_are_left_out_and_hosts_over_the_limit_are_counted(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(layout, "MAX_HOSTS", 2)
    store.members[:] = [replace(each, global_rank=None) if each.global_rank == 3 else each for each in store.members]
    view = view_of(store)
    assert [host.ranks for host in view.hosts] == [(0, 1, 2, 4, 5, 6, 7), tuple(range(8, 16))]
    assert view.hosts_known == 8
    assert {rank for group in view.groups for rank in group.ranks} <= set(range(16)) - {3}
