from __future__ import annotations

import random
from collections.abc import Sequence

import numpy as np
import pytest

from ncclscope_service.intake.call_groups import ALONE, DOUBTFUL_MARKS, CallGroups
from ncclscope_wire import tables
from ncclscope_wire.terms import NO_NUMBER

THREAD = 7 << 32 | 41
_KINDS = {"(": tables.GROUP_START, ")": tables.GROUP_END, "~": tables.CALLS_TORN, "!": tables.CALLS_BEGIN}


def groups_of(script: str, *, cuts: Sequence[int] = (), calls: Sequence[int] | None = None) -> list[int]:
    """The groups of a thread's lines: `o` an operation, `(` and `)` a group, `~` a torn line, `!` the first CALL line.

    The lines are fed in portions that end at `cuts`; `calls` tell the operations apart (all differ without it).
    """
    numbers = CallGroups()
    found: list[int] = []
    names = iter(calls if calls is not None else range(len(script)))
    for begin, end in zip((0, *cuts), (*cuts, len(script)), strict=True):
        lines = [at for at in range(begin, end) if script[at] == "o"]
        marks = [(0, at, _KINDS[script[at]]) for at in range(begin, end) if script[at] != "o"]
        found += numbers.group_operations(
            threads=np.full(len(lines), THREAD),
            lines=np.array(lines, np.int64),
            calls=np.array([next(names) for _ in lines], np.int32),
            marks=np.array(marks, tables.CALL_MARK),
            mark_threads=np.full(len(marks), THREAD),
        ).tolist()
    return found


@pytest.mark.parametrize(
    ("script", "groups"),
    [
        ("ooo", [NO_NUMBER] * 3),
        ("!ooo", [ALONE] * 3),
        ("!(oo)(oo)", [0, 0, 1, 1]),
        ("!o(oo)o", [ALONE, 0, 0, ALONE]),
        ("!((o)(o))o", [0, 0, ALONE]),  # up to 2.22 a Send opens a group of its own
        ("!(o)(o)", [0, 1]),
        ("!()o", [ALONE]),
        ("!o)o(oo)", [ALONE, ALONE, 0, 0]),  # the log begins in the middle
        ("oo!(oo)", [NO_NUMBER, NO_NUMBER, 0, 0]),
    ],
)
def test_a_group_is_what_the_outermost_pair_holds(script: str, groups: list[int]) -> None:
    assert groups_of(script) == groups


def test_groups_do_not_depend_on_how_the_lines_were_cut() -> None:
    chance = random.Random(4)
    script = "!" + "".join(chance.choice(("o", "(oo)", "((o)(o)o)", "(ooo)")) for _ in range(400))
    script = script[:200] + "~" + script[200:]
    whole = groups_of(script)
    cuts = sorted(chance.sample(range(1, len(script)), 60))
    assert groups_of(script, cuts=cuts) == whole
    assert len(set(whole)) > 20


def test_after_a_torn_line_nothing_is_said_until_the_depth_is_certain() -> None:
    groups = groups_of("!(oo)(oo~" + "(oo)" * 100)
    told = [group for group in groups[4:] if group != NO_NUMBER]
    assert groups[:4] == [0, 0, 1, 1]
    assert all(group == NO_NUMBER for group in groups[4 : 4 + DOUBTFUL_MARKS - 2])
    assert len(told) > 100
    assert sorted(told.count(group) for group in set(told)) == [2] * len(set(told))


def test_a_group_whose_end_was_lost_in_silence_is_no_group() -> None:
    script = "!" + "(oo" + "(oo)" * 100
    groups = groups_of(script, calls=[0, 1] * 101)
    assert groups.count(NO_NUMBER) < 100
    told = [group for group in groups if group != NO_NUMBER]
    assert all(told.count(group) == 2 for group in set(told))


def test_threads_have_groups_of_their_own() -> None:
    marks = np.array(
        [(0, 1, tables.CALLS_BEGIN), (0, 2, tables.GROUP_START), (0, 5, tables.GROUP_END)], tables.CALL_MARK
    )
    groups = CallGroups(source=3).group_operations(
        threads=np.array([THREAD, THREAD + 1, THREAD]),
        lines=np.array([3, 3, 4]),
        calls=np.array([1, 2, 3], np.int32),
        marks=marks,
        mark_threads=np.full(3, THREAD),
    )
    assert groups[0] == groups[2] >= 0
    assert groups[1] == ALONE
