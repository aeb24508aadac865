"""A session over a spool: nothing is lost or applied twice, whoever is killed and whatever vanishes."""

from __future__ import annotations

from agent.spool_samples import SECOND
from agent.spool_world import World
from hypothesis import given, settings
from hypothesis import strategies as st

from ncclscope_agent.link.frames import WindowLimits
from ncclscope_agent.spool.limits import SpoolLimits


def away(world: World) -> World:
    """The same, with a service that cannot be reached from the beginning."""
    world.fail_to_connect()
    return world


def fill(world: World, lines: int = 60, *, log: int = 0) -> None:
    """Writes and reads so many lines, and has them spooled."""
    world.write(log, lines)
    for _ in range(lines):
        world.read()
    world.write_spool()


def test_while_the_service_is_away_reading_goes_on_far_beyond_the_window() -> None:
    world = away(World(window=WindowLimits(max_batches=2)))
    fill(world, 200)
    assert world.logs[0].read_to == 200
    assert world.session.statistics().window_batches == 40
    world.settle()
    assert not list(world.missing())


def test_what_the_service_has_of_a_session_is_not_sent_again_after_a_restart() -> None:
    world = World()
    world.converse(2)
    fill(world)
    world.converse(4)
    world.kill_agent()
    world.vanish(0)
    world.settle()
    assert world.applied.lines[world.logs[0].key] == list(range(1, 61))
    assert sum(world.receiver.statistics().duplicates.values()) == 0


def test_a_service_that_lost_its_state_gets_the_rest_of_a_deleted_log_and_a_gap_before_it() -> None:
    world = World()
    world.converse(2)
    fill(world, 30)
    world.settle()
    world.disconnect()
    fill(world, 30)
    world.vanish(0)
    world.lose_service()
    world.settle()
    assert world.applied.lines[world.logs[0].key] == list(range(31, 61))
    assert world.applied.gaps == {"spool_lost": 30}


def test_what_the_service_has_beyond_the_spool_is_cut_off_by_line() -> None:
    world = World(limits=SpoolLimits(sync_ns=1000 * SECOND), logs=1)
    world.converse(2)
    fill(world, 33)
    world.settle()
    world.cut_power()
    world.fail_to_connect()
    world.write(0, 30)
    for _ in range(20):
        world.read(7)
    world.write_spool()
    world.vanish(0)
    world.settle()
    assert world.applied.lines[world.logs[0].key] == list(range(1, 64))


def test_expired_batches_leave_a_gap_and_the_others_arrive() -> None:
    world = away(World(limits=SpoolLimits(transaction_bytes=2000, max_age_ns=30 * SECOND, sync_ns=0), logs=1))
    fill(world, 40)
    world.now_ns += 100 * SECOND
    fill(world, 40)
    dropped = world.session.spool.statistics().dropped
    world.kill_agent()
    world.vanish(0)
    world.settle()
    assert dropped["expired"] * 5 == world.applied.gaps["spool_lost"] >= 35
    assert not list(world.missing())


STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("write"), st.integers(0, 1), st.integers(1, 30)),
        st.tuples(st.just("read"), st.integers(1, 9), st.just(0)),
        st.tuples(st.just("converse"), st.integers(1, 6), st.just(0)),
        st.tuples(
            st.sampled_from(
                ["spool", "look", "look", "full", "kill", "power", "lose", "disconnect", "refuse", "new chapter"]
            ),
            st.just(0),
            st.just(0),
        ),
    ),
    max_size=50,
)


def act(world: World, step: tuple[str, int, int]) -> None:
    kind, first, second = step
    match kind:
        case "write":
            world.write(first, second)
        case "read":
            world.read(first)
        case "converse":
            world.converse(first)
        case "spool":
            world.write_spool()
        case "look":
            world.write_spool(at_once=False)
        case "full":
            world.fail_spool()
        case "kill":
            world.kill_agent()
        case "power":
            world.cut_power()
        case "lose":
            world.lose_service()
        case "disconnect":
            world.disconnect()
        case _:
            world.fail_to_connect()


@settings(max_examples=100)
@given(STEPS)
def test_whatever_happens_to_agent_service_and_disk_no_line_of_a_log_that_is_there_is_lost(
    steps: list[tuple[str, int, int]],
) -> None:
    world = World(limits=SpoolLimits(transaction_bytes=1500, sync_ns=3 * SECOND, retry_ns=0))
    for step in steps:
        act(world, step)
    world.settle()
    assert not list(world.missing())
    assert not world.applied.gaps


@settings(max_examples=100)
@given(STEPS, STEPS)
def test_what_was_spooled_of_a_log_arrives_though_the_log_is_gone(
    before: list[tuple[str, int, int]], after: list[tuple[str, int, int]]
) -> None:
    world = World(limits=SpoolLimits(transaction_bytes=1500, sync_ns=0, retry_ns=0), logs=2)
    for step in before:
        if step[0] not in ("lose", "power"):
            act(world, step)
    world.disconnect()
    world.fail_to_connect()
    for _ in range(100):
        world.read()
    world.write_spool()
    assert all(log.read_to == log.lines for log in world.logs)
    world.vanish(0)
    world.vanish(1)
    for step in after:
        if step[0] not in ("lose", "power", "write"):
            act(world, step)
    world.settle()
    assert not list(world.missing())
    assert not world.applied.gaps
