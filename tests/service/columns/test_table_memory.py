"""Whatever a table does with its memory, its rows are those of a list."""

from __future__ import annotations

import resource
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ncclscope_service.columns import table as tables
from ncclscope_service.columns.table import Reserved, Table, reserve
from ncclscope_service.store import state
from ncclscope_service.store.tables import Store
from ncclscope_wire.batch import Columns

_ROW = np.dtype([("number", "<i8"), ("late", "<i8")])
_LARGE = 40_000
"""Bytes: larger than what a table begins with, so that a few appends lead from one kind of memory to the other."""


def _rows(begin: int, end: int) -> Columns:
    rows = np.full(end - begin, -2, _ROW)
    rows["number"] = np.arange(begin, end)
    return rows


def _table(amount: int, *, large_bytes: int = _LARGE) -> Table:
    table = Table(_ROW, large_bytes=large_bytes)
    table.append(_rows(0, amount))
    return table


def _check(table: Table, begin: int, end: int) -> None:
    assert (table.first, table.next_id, len(table)) == (begin, end, end - begin)
    assert table.rows["number"].tolist() == list(range(begin, end))
    asked = np.arange(begin, end)[::-7]
    assert table.take(asked)["number"].tolist() == asked.tolist()
    assert table.take(asked, "number")["number"].tolist() == asked.tolist()


def _resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


_STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("put"), st.floats(0, 0.999)),
        st.tuples(st.sampled_from(("append", "append known")), st.integers(0, 1500)),
        st.tuples(st.just("drop"), st.floats(0, 1.1)),
        st.tuples(st.just("view"), st.floats(0, 0.999)),
        st.tuples(st.sampled_from(("copy", "restore")), st.just(0)),
    ),
    max_size=40,
)


@given(_STEPS, st.sampled_from((0, _LARGE, 2**30)))
def test_a_table_is_what_a_list_would_be(steps: list[tuple[str, float]], large_bytes: int) -> None:
    table, begin, end = Table(_ROW, unknown=np.array([(-1, -2)], _ROW), packed=["late"], large_bytes=large_bytes), 0, 0
    late = dict[int, int]()
    for step, amount in steps:
        if step.startswith("append"):
            rows = _rows(end, end + int(amount))
            if step == "append known":
                rows["late"] = rows["number"]
                late.update({row: row for row in rows["number"].tolist()})
            ids = table.append(rows)
            assert ids.tolist() == list(range(end, end + int(amount)))
            end += int(amount)
        elif step == "drop":
            begin = min(end, begin + int(amount * (end - begin)))
            table.drop_before(begin)
        elif step == "put" and end > begin:
            row = begin + int(amount * (end - begin))
            late[row] = row << (33 if row % 5 == 0 else 0)
            table.rows.put("late", table.at(np.array([row])), late[row])
        elif step == "put":
            continue
        elif step == "view":
            row = begin + int(amount * (end - begin))
            part = table.rows[row - begin : row - begin + 50]["late"]
            assert part.tolist() == [late.get(each, -2) for each in range(row, min(row + 50, end))]
        elif step == "copy":
            before, table = table, table.copy()
            before.rows["number"] = -1
        else:
            store = Store()
            store.operations = table
            table = state.restore(state.snapshot(store), Store).operations
        _check(table, begin, end)
        everything = np.arange(begin, end)
        assert table.take(everything, "late")["late"].tolist() == [late.get(row, -2) for row in everything.tolist()]
    assert table.rows["late"].tolist() == [late.get(row, -2) for row in range(begin, end)]


def test_rows_stay_where_they_are_while_a_large_table_grows() -> None:
    table = _table(4000)
    first = table.rows["number"].ctypes.data
    for begin in range(4000, 200_000, 2000):
        table.append(_rows(begin, begin + 2000))
    assert table.rows["number"].ctypes.data == first
    _check(table, 0, 200_000)


def test_dropping_never_moves_what_is_kept() -> None:
    table = _table(9000)
    seen = table.rows[8000:]["number"].ctypes.data
    table.drop_before(8000)
    assert table.rows["number"].ctypes.data == seen


def test_no_more_memory_is_used_than_for_a_quarter_more_rows_than_are_kept() -> None:
    table = _table(10_000)
    for end in range(10_500, 200_000, 500):
        table.append(_rows(end - 500, end))
        table.drop_before(end - 10_000)
    _check(table, 189_500, 199_500)
    assert table.used_bytes <= (1.25 * 10_000 + 2 * 500) * _ROW.itemsize


def test_what_was_dropped_takes_no_memory_of_the_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a column that only some rows have, too, and after rows were moved to the front of what is reserved."""
    monkeypatch.setattr(tables, "_RESERVED_BYTES", 2**27)
    table = Table(_ROW, unknown=np.array([(-1, -2)], _ROW), large_bytes=0)
    table.append({"number": np.arange(100_000)})
    before, most, step, places = _resident_bytes(), 0, 100_000, {table.rows["number"].ctypes.data}
    for begin in range(step, 3 * 2**27 // _ROW.itemsize, step):
        ids = table.append({"number": np.arange(begin, begin + step)})
        table.rows.put("late", table.at(ids[:1000]), np.full(1000, 7))
        table.drop_before(begin)
        places.add(table.rows["number"].ctypes.data)
        most = max(most, _resident_bytes() - before)
        assert table.take(ids[::9999])["number"].tolist() == ids[::9999].tolist()
        assert table.take(ids[::9999], "late")["late"].tolist() == [7] + [-2] * 10
    assert most < 5 * step * _ROW.itemsize
    assert max(places) - min(places) < 2**26, "it stays in the memory that it has"


@pytest.mark.parametrize("is_restored", [False, True])
def test_memory_of_many_rows_is_given_back_when_few_are_kept(is_restored: bool) -> None:
    table = _table(100_000)
    if is_restored:
        table = table.copy()
    table.drop_before(99_000)
    table.append(_rows(100_000, 100_100))
    assert table.used_bytes <= 1.5 * 1100 * _ROW.itemsize
    _check(table, 99_000, 100_100)


def test_what_is_given_back_takes_no_memory() -> None:
    reserved = Reserved(_ROW, 3_000_000)
    numbers = reserved.columns["number"][:1_000_000]
    late = reserved.columns["late"]
    numbers[:], late[:] = 7, 7
    reserved.release({"number": (1000, 900_000), "late": (0, 3_000_000)})
    assert numbers[:1000].tolist() == [7] * 1000
    assert (numbers[1000 + 512 : 900_000 - 512] == 0).all()  # Linux gives pages without content where there were none
    assert (numbers[900_000:] == 7).all()
    assert not late[: 3_000_000 - 512].any()
    reserved.release({"number": (0, 0), "late": (5, 6)})


_LITTLE = """
import resource
import numpy as np
from ncclscope_service.columns.table import reserve
row = np.dtype([("number", "<i8")])
used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (used + 2**30, used + 2**30))
given = reserve(row, 2**20)
print(given.columns["number"].nbytes >> 20)
np.empty(2**29, np.uint8)
try:
    reserve(row, 2**27)
except MemoryError as error:
    print(str(error)[:18])
"""


def test_where_the_system_gives_little_less_is_reserved_and_most_of_it_left_to_others() -> None:
    ran = subprocess.run([sys.executable, "-c", _LITTLE], capture_output=True, text=True, check=True)
    given, refused = ran.stdout.splitlines()
    assert 10 <= int(given) <= 256
    assert refused == "the system gives n"


def test_what_a_machine_has_is_no_limit_to_what_is_reserved_for_a_large_table() -> None:
    assert reserve(_ROW, 1000).capacity > 4_000_000
