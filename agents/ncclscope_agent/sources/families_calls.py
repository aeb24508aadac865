# ruff: noqa: E501  a pattern is as long as the line that it reads
"""Lines that name a function: API calls, the frames of a call stack, and the prefix of trace builds.

*Source:* NCCL `src/misc/argcheck.cc`, `src/collectives.cc`, `src/init.cc` (calls), `src/include/checks.h` (call
stacks), `src/debug.cc` (TRACE).
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Final

from ncclscope_agent.sources.log_family import FILE_AND_LINE, POINTER, Family, Fields, form
from ncclscope_wire import facts

FRAME: Final = re.compile(rb"[\w/.-]{1,100}\.(?:cc|h|cu|c):\d{1,6} ")
"""What calls, allocations and downgraded warnings put in front of their message."""

TRACE: Final = re.compile(rb"(\d{1,15}\.\d{6}) ([\w:~]{1,80}):\d{1,6} ?")
"""What stands between `[dev]` and `NCCL TRACE`: milliseconds since start, function, line."""

STACK: Final[tuple[Family, ...]] = (
    form(
        "call_stack",
        facts.CallFrame,
        "",
        FILE_AND_LINE
        + r" (?:\((?P<function>[\w:~]{1,80})\) )?-> (?P<result>-?\d{1,5})(?: \[(?P<thread>[\w ]{1,40})\])?",
    ),
)

_ARGUMENT: Final = r"(?:0x[0-9a-f]{1,16}|[0-9a-f]{1,16}|\(nil\))"


def _arguments(fields: Fields) -> Fields:
    texts = [text.strip() for text in str(fields.pop("list") or "").split(",") if text.strip()]
    return {**fields, "arguments": [0 if text == "(nil)" else int(text, 16) for text in texts]}


def _call(pattern: str, finish: Callable[[Fields], Fields] | None = None) -> Family:
    return form("call", facts.ApiCall, "", pattern, finish=finish, is_closed=True, travels=False)


CALLS: Final[tuple[Family, ...]] = (
    _call(r"(?P<function>ncclGroupStart|ncclGroupEnd)\(\)"),
    _call(
        r"(?P<function>nccl[A-Z]\w{1,40})\((?P<send_buffer_hex>(?:0x)?[0-9a-f]{1,16}),(?P<recv_buffer_hex>(?:0x)?[0-9a-f]{1,16}),"
        r"(?P<count>\d{1,20}),(?P<data_type>\d+),(?P<reduction>\d+),(?P<root>-?\d+),"
        rf"(?P<communicator_hex>{POINTER}),(?P<stream_hex>{POINTER})\)",
    ),
    _call(
        r"(?P<function>ncclCommInitRank\w{0,20})\((?P<communicator_hex>0x[0-9a-f]{1,16}), (?P<nranks>\d+), (?P<comm_id_hex>0x[0-9a-f]{1,16}),"
        r" (?P<rank>\d+), (?P<cuda_device>\d+)\)",
    ),
    _call(
        rf"(?P<function>ncclCommSplit)\((?P<parent_hex>{POINTER}), (?P<color>-?\d+), (?P<key>-?\d+), (?P<communicator_hex>{POINTER}),"
        r" (?P<rank>-?\d+), (?P<nranks>\d+)\)",
    ),
    _call(
        rf"(?P<function>(?:p?nccl)[A-Z]\w{{1,60}})\((?P<list>(?:{_ARGUMENT}(?:, ?{_ARGUMENT}){{0,15}})?)\)",
        finish=_arguments,
    ),
)
"""What stands behind `NCCL CALL `. *Source:* NCCL `src/misc/argcheck.cc`, `src/collectives.cc`, `src/init.cc`."""
