"""Dumps of PyTorch's Flight Recorder are read without running anything of them."""

from __future__ import annotations

import json
import pickle
from collections.abc import Callable
from pathlib import Path

import pytest
from agent.flight_samples import as_pytorch_pickles, dump, entry
from hypothesis import given
from hypothesis import strategies as st

from ncclscope_agent.files.recognise import FileKind, recognise
from ncclscope_agent.sources.flight_recorder.dump import rank_of_name, read_dump
from ncclscope_agent.sources.flight_recorder.plain_pickle import load_plain
from ncclscope_wire.errors import FormatError


def _by_python(protocol: int) -> Callable[[object], bytes]:
    return lambda value: pickle.dumps(value, protocol)


FORMS: dict[str, Callable[[object], bytes]] = {
    "PyTorch": as_pytorch_pickles,
    **{f"Python {number}": _by_python(number) for number in (2, 3, 4, 5)},
    "JSON": lambda value: json.dumps(value).encode(),
}
WAITING = dump(entry(1), entry(2), entry(3, "started"), entry(9, is_p2p=True))


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS.keys())
def test_the_first_collective_that_did_not_complete_is_kept_with_its_stack(form: Callable[[object], bytes]) -> None:
    data = form(WAITING)
    assert recognise(data, "nccl_trace_rank_12") is FileKind.FLIGHT_RECORDER
    (record,) = read_dump(data, "dumps/nccl_trace_rank_12")
    assert (record.global_rank, record.group, record.description) == (12, "0", "default_pg")
    assert (record.last_enqueued, record.last_completed, record.sequence) == (3, 2, 3)
    assert (record.operation, record.state, record.sizes) == ("all_reduce", "started", "[[3, 4]]")
    assert record.group_ranks == (0, 1, 2, 3)
    assert record.stack == ("train.py:103 in train_step", "train.py:7 in main")  # without PyTorch's own frames


def test_sends_and_receives_that_were_called_together_are_no_collective() -> None:
    """As PyTorch 2.11 writes them: the group of both has the number of the last collective, and their op_id."""
    pairs = [
        entry(1, "scheduled", op_id=2, is_p2p=True, profiling_name=f"nccl:{name} 0->1") for name in ("send", "recv")
    ]
    coalesced = entry(1, "started", op_id=2, profiling_name="nccl:coalesced")
    (record,) = read_dump(as_pytorch_pickles(dump(entry(1), *pairs, coalesced)), "rank_0")
    assert (record.operation, record.last_enqueued, record.last_completed) == ("all_reduce", 1, 1)


def test_a_rank_that_waits_for_nothing_shows_what_it_called_last() -> None:
    (record,) = read_dump(as_pytorch_pickles(dump(entry(1), entry(2))), "rank_0")
    assert (record.sequence, record.last_completed, record.stack[0]) == (2, 2, "train.py:102 in train_step")


@pytest.mark.parametrize(
    ("name", "rank"),
    [("nccl_trace_rank_12", 12), ("a/b_rank7.json", 7), ("rank_3.pkl", 3), ("trace", None), ("12/trace.bin", None)],
)
def test_the_rank_ends_the_name_of_the_file(name: str, rank: int | None) -> None:
    assert rank_of_name(name) == rank


class _Runs:
    """What must never be called."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __reduce__(self) -> tuple[Callable[..., object], tuple[object, ...]]:
        return Path.write_text, (self._path, "ran")


@pytest.mark.parametrize("protocol", [0, 1, 2, 4, 5])
def test_a_pickle_that_would_run_something_is_refused_and_runs_nothing(tmp_path: Path, protocol: int) -> None:
    path = tmp_path / "ran"
    with pytest.raises(FormatError):
        load_plain(pickle.dumps({"collective_seq_id": _Runs(path)}, protocol))
    assert not path.exists()


@pytest.mark.parametrize(
    "data",
    [
        pytest.param(as_pytorch_pickles(WAITING)[:-30], id="cut off"),
        pytest.param(as_pytorch_pickles({"entries": 1}), id="no entries"),
        pytest.param(b"\x80\x02}q\x00(X\xff\xff\xff\xffabc", id="a text beyond the end"),
        pytest.param(b"\x80\x02]" + b"q\x00h\x00a" * 3 + b"K\x01u.", id="items without a mark"),
        pytest.param(b'{"entries": [', id="cut off JSON"),
        pytest.param(b"", id="nothing"),
    ],
)
def test_what_is_no_dump_is_refused(data: bytes) -> None:
    with pytest.raises(FormatError):
        read_dump(data, "rank_1")


def _nested(levels: int) -> list[object]:
    """A list that as text has 10**levels numbers."""
    found: list[object] = [1] * 10
    for _ in range(levels - 1):
        found = [found] * 10
    return found


def test_lists_that_hold_each_other_many_times_take_no_memory() -> None:
    content = dump(entry(1, input_sizes=_nested(40), frames=_nested(40)))
    content["pg_config"] = {"0": {"ranks": _nested(40)}}
    (record,) = read_dump(pickle.dumps(content, 2), "rank_1")
    assert (record.group_ranks, record.sizes, record.stack) == ((), "", ())


def test_a_long_text_that_all_groups_name_is_looked_at_once() -> None:
    ranks = "[" + "1, " * 1_000_000 + "2]"
    entries = [entry(1, process_group=(str(group), "")) for group in range(2_000)]
    content = {**dump(*entries), "pg_config": {str(group): {"ranks": ranks} for group in range(2_000)}}
    records = read_dump(pickle.dumps(content, 2), "rank_1")
    assert sum(bool(record.group_ranks) for record in records) == 2


PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**63 - 1) | st.floats(allow_nan=False) | st.text(max_size=300),
    lambda inner: st.lists(inner, max_size=6) | st.tuples(inner, inner) | st.dictionaries(st.text(), inner, max_size=6),
    max_leaves=40,
)


@given(value=PLAIN, protocol=st.sampled_from([2, 3, 4, 5]))
def test_plain_values_are_read_as_python_reads_them(value: object, protocol: int) -> None:
    assert load_plain(pickle.dumps(value, protocol)) == value
