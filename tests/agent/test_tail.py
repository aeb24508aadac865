from __future__ import annotations

from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ncclscope_agent.files.tail import (
    HEAD_BYTES,
    Decision,
    FileIdentity,
    Tail,
    TailState,
    Verdict,
    fingerprint,
    identity_in,
    source_key,
)

HERE = FileIdentity(1, 10)
THERE = FileIdentity(1, 11)
WAIT = Decision(verdict=Verdict.WAIT)


def followed(offset: int = 0, head: bytes = b"") -> Tail:
    tail = Tail(HERE, grace_ns=100)
    tail.start(offset, head)
    return tail


# Identity


@pytest.mark.parametrize("first", [b"node17:1:2 [0] NCCL INFO x\n", b"\n\nnode17:1:2 x\n", b"y" * 300])
def test_a_fingerprint_does_not_change_as_the_file_grows(first: bytes) -> None:
    grown = [first + b"more\n" * length for length in range(100)]
    assert len({fingerprint(head[:HEAD_BYTES]) for head in grown}) == 1


@pytest.mark.parametrize("head", [b"", b"\n", b"node17:1:2 [0] NCCL", b"z" * 255])
def test_there_is_no_fingerprint_before_the_first_line_is_complete(head: bytes) -> None:
    assert fingerprint(head) is None
    assert (fingerprint(head, is_complete=True) is None) == (not head)


def test_files_that_begin_differently_have_different_keys() -> None:
    prints = [fingerprint(f"node17:{pid}:2 [0] NCCL INFO Bootstrap\n".encode()) for pid in range(50)]
    assert len(set(prints)) == 50


def test_a_key_names_device_inode_fingerprint_and_generation() -> None:
    assert source_key(HERE, "ab", 0) == "1-10-ab"
    assert source_key(HERE, "ab", 2) == "1-10-ab-2"


# Transitions


def test_nothing_is_read_before_the_file_has_an_identity() -> None:
    tail = Tail(HERE, grace_ns=100)
    assert tail.on_look(500, 0) == WAIT
    tail.start(0, b"x" * 500)
    assert tail.on_look(500, 1).verdict is Verdict.READ


def test_a_file_that_grew_is_read_and_one_that_did_not_is_left_alone() -> None:
    tail = followed()
    assert tail.on_look(0, 0) == WAIT
    assert tail.on_look(3, 1).verdict is Verdict.READ
    assert tail.on_read(b"abc", b"abc", 3) == WAIT
    assert (tail.offset, tail.unread_bytes) == (3, 0)
    assert tail.on_look(3, 2) == WAIT


def test_a_shorter_file_was_truncated_and_what_was_seen_and_not_read_is_lost() -> None:
    tail = followed()
    tail.on_look(10, 0)
    tail.on_read(b"abcd", b"abcdefghij", 10)
    assert tail.on_look(2, 1) == Decision(verdict=Verdict.BEGIN_ANEW, reason="truncated", lost_bytes=6)
    assert tail.state is TailState.ENDED


def test_a_file_that_begins_differently_was_truncated_though_it_is_longer() -> None:
    tail = followed()
    tail.on_look(4, 0)
    tail.on_read(b"abcd", b"abcd", 4)
    assert tail.on_look(9, 1).verdict is Verdict.READ
    assert tail.on_read(b"vwxyz", b"rstuvwxyz", 9).reason == "truncated"
    assert tail.offset == 4


def test_a_file_truncated_between_looking_and_reading_is_noticed() -> None:
    tail = followed()
    tail.on_look(4, 0)
    assert tail.on_read(b"ab", b"", 4).verdict is Verdict.BEGIN_ANEW
    tail = followed()
    tail.on_look(4, 0)
    assert tail.on_read(b"abcd", b"xy", 4).verdict is Verdict.BEGIN_ANEW


@pytest.mark.parametrize("found", [THERE, None])
def test_a_file_that_is_away_is_read_on_and_ended_after_a_silence_with_nothing_lost(found: FileIdentity | None) -> None:
    tail = followed()
    tail.on_path(found)
    assert tail.state is TailState.AWAY
    assert tail.on_look(3, 0).verdict is Verdict.READ
    tail.on_read(b"abc", b"abc", 3)
    assert tail.on_look(3, 50) == WAIT
    assert tail.on_look(3, 149) == WAIT
    assert tail.on_look(5, 150).verdict is Verdict.READ
    tail.on_read(b"de", b"abcde", 5)
    assert tail.on_look(5, 200) == WAIT
    assert tail.on_look(5, 300) == Decision(verdict=Verdict.FINISH)


def test_a_file_that_has_a_name_somewhere_is_held_for_longer() -> None:
    tail = Tail(HERE, grace_ns=100, named_grace_ns=1000)
    tail.start(0, b"")
    tail.on_path(THERE)
    assert tail.on_look(0, 0, has_name=True) == WAIT
    assert tail.on_look(0, 999, has_name=True) == WAIT
    assert tail.on_look(0, 999).verdict is Verdict.FINISH
    assert tail.on_look(0, 1000, has_name=True).verdict is Verdict.FINISH


@pytest.mark.parametrize("last", [b"abcd", b"\0\0cd", b"\0\0\0\0"])
def test_the_bytes_in_front_must_be_those_that_were_read_last_or_given_back(last: bytes) -> None:
    tail = followed()
    tail.on_look(4, 0)
    tail.on_read(b"abcd", b"abcd", 4)
    assert tail.overlap == 4
    assert tail.on_read(b"e", b"abcde", 5, last).verdict is Verdict.WAIT
    assert tail.on_read(b"f", b"abcdef", 6, b"abxde") == Decision(verdict=Verdict.BEGIN_ANEW, reason="truncated")


def test_a_key_names_its_file_and_keys_of_exports_name_none() -> None:
    print_of_head = fingerprint(b"a line\n")
    assert print_of_head is not None
    assert identity_in(source_key(HERE, print_of_head, 0)) == identity_in(source_key(HERE, print_of_head, 2)) == HERE
    assert identity_in(f"fe01-1f-400-1-{print_of_head}") is None


def test_a_file_that_comes_back_is_followed_again() -> None:
    tail = followed()
    tail.on_path(None)
    tail.on_look(0, 0)
    tail.on_path(HERE)
    assert tail.state is TailState.FOLLOWED
    assert tail.on_look(0, 1000) == WAIT
    tail.on_path(None)
    assert tail.on_look(0, 1001) == WAIT


def test_a_clock_that_steps_back_begins_the_silence_anew() -> None:
    tail = followed()
    tail.on_path(None)
    tail.on_look(0, 1000)
    assert tail.on_look(0, 10) == WAIT
    assert tail.on_look(0, 110).verdict is Verdict.FINISH


def test_a_file_that_cannot_be_read_ends_with_what_it_had() -> None:
    tail = followed()
    tail.on_look(7, 0)
    assert tail.give_up() == Decision(verdict=Verdict.FINISH, reason="unreadable", lost_bytes=7)


def test_a_file_written_anew_to_the_same_size_is_noticed_by_its_time() -> None:
    tail = followed()
    tail.on_look(4, 0, 1)
    tail.on_read(b"abcd", b"abcd", 4)
    assert tail.on_look(4, 1, 1) == WAIT
    assert tail.on_look(4, 2, 2).verdict is Verdict.READ
    assert tail.on_read(b"", b"wxyz", 4).reason == "truncated"


SECOND = 1_000_000_000


def emptied(*, looks_s: list[float], size: int = 4, written_s: float = 0.0) -> Decision:
    """What is decided about a file of 4 bytes, all read at 0 s, that is found empty at the last of these looks."""
    tail = followed()
    tail.on_look(4, 0, 1)
    tail.on_read(b"abcd", b"abcd", 4)
    for look_s in looks_s[:-1]:
        modified_ns = 1 if look_s < written_s or not written_s else 2
        tail.on_look(size, round(look_s * SECOND), modified_ns)
    return tail.on_look(0, round(looks_s[-1] * SECOND), 3)


@pytest.mark.parametrize(
    ("looks_s", "reason"),
    [
        ([0.25, 0.5, 0.75, 1.0, 1.25], None),
        ([0.25, 0.5, 0.75], "truncated"),
        ([1.0, 1.26], "truncated"),
        ([3600.0, 3600.9], None),
        ([3600.0, 3601.1], "truncated"),
        ([3600.0, 1.0], "truncated"),
    ],
    ids=[
        "at rest for a second",
        "for less",
        "not looked at for a quarter of it",
        "for an hour",
        "not looked at for a second",
        "clock set back",
    ],
)
def test_a_file_that_was_emptied_lost_nothing_if_all_was_read_and_its_writer_was_at_rest(
    looks_s: list[float], reason: str | None
) -> None:
    assert emptied(looks_s=looks_s) == Decision(verdict=Verdict.BEGIN_ANEW, reason=reason)


def test_it_did_if_its_writer_was_busy_or_something_was_not_read() -> None:
    looks_s = [0.25, 0.5, 0.75, 1.0, 1.25]
    assert emptied(looks_s=looks_s, written_s=0.5).reason == "truncated"
    tail = followed()
    tail.on_look(9, 0, 1)
    tail.on_read(b"abcd", b"abcd", 9)
    tail.on_look(9, 2 * SECOND, 1)
    assert tail.on_look(0, 2 * SECOND + 1, 2) == Decision(verdict=Verdict.BEGIN_ANEW, reason="truncated", lost_bytes=5)


# Model: a file as a list of contents, each of which must come out as a prefix, in order


@dataclass
class Modelled:
    """A file that is appended to and truncated, and everything that a tail read of it."""

    content: bytes = b""
    truncations: int = 0
    writes: int = 0
    tail: Tail = field(default_factory=followed)
    read: list[bytes] = field(default_factory=lambda: [b""])

    def look(self, most: int) -> None:
        decision = self.tail.on_look(len(self.content), 0, self.writes)
        if decision.verdict is Verdict.READ:
            data = self.content[self.tail.offset : self.tail.offset + most]
            decision = self.tail.on_read(data, self.content[:HEAD_BYTES], len(self.content))
            if decision.verdict is not Verdict.BEGIN_ANEW:
                self.read[-1] += data
        if decision.verdict is Verdict.BEGIN_ANEW:
            self.tail = followed()
            self.read.append(b"")

    def truncate(self) -> None:
        self.truncations += 1
        self.content = b""
        self.writes += 1

    def append(self, amount: int) -> None:
        self.writes += 1
        self.content += bytes([65 + self.truncations]) * amount


_STEPS = st.lists(
    st.tuples(st.just("append"), st.integers(1, 30))
    | st.tuples(st.just("look"), st.integers(1, 40))
    | st.just(("truncate", 0)),
    max_size=60,
)


@settings(max_examples=300)
@given(steps=_STEPS)
def test_what_is_read_is_a_prefix_of_each_content_and_never_a_mixture(steps: list[tuple[str, int]]) -> None:
    file = Modelled()
    for step, amount in steps:
        if step == "append":
            file.append(amount)
        elif step == "look":
            file.look(amount)
        else:
            file.truncate()
    while file.content and file.read[-1] != file.content:
        before = (len(file.read), file.read[-1])
        file.look(7)
        assert (len(file.read), file.read[-1]) != before
    assert all(len(set(read)) <= 1 for read in file.read)
    assert [read[:1] for read in file.read if read] == sorted({read[:1] for read in file.read if read})
