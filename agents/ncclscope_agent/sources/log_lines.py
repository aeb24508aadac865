"""The shapes of NCCL's log lines: the one table of regular expressions.

Scope: lines of NCCL 2.4 to 2.30, of RCCL, and of forks that put text between `[dev]` and `NCCL INFO`.
All patterns are over bytes, run in linear time on lines of bounded length, and are tried in the order of
`FAMILIES` on the message behind the prefix. What is left out on purpose, and the NCCL function that
prints each form, is listed in `docs/formats.md`.

*Source:* the format strings in NCCL `src/debug.cc:ncclDebugLog` (prefix), `src/enqueue.cc:ncclEnqueueCheck`
(operation), `src/enqueue.cc` and `src/scheduler/symmetric_sched.cc` (tuning), `src/init.cc` (life cycle,
version), `src/misc/argcheck.cc` and `src/collectives.cc` (calls).
"""

from __future__ import annotations

import re
from typing import Final

MARKER: Final = re.compile(rb"NCCL (?:INFO|WARN|CALL|TRACE) ")
"""What every line of NCCL holds, but for bare version lines and the continuations of long messages."""

WRITER: Final = re.compile(rb":(\d{1,10}):(\d{1,10}) ")
"""`:pid:tid ` of the prefix; the host stands directly in front, see `HOST_BYTES`."""

HOST_BYTES: Final = b"abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789-_<>"
"""What a host name is made of: gethostname() is cut at the first dot. Angle brackets are people's masks."""

BETWEEN: Final = re.compile(rb"(?:\[(-?\d{1,5})\] )?(\S.{0,160} )?")
"""Between `:pid:tid ` and `NCCL LEVEL`: `[dev]`, absent from CALL lines; then file:line, function or a
number, which WARN, TRACE, RCCL and forks print there."""

_POINTER = rb"0x[0-9a-f]{1,16}|\(nil\)"

OPERATION_HEAD: Final = re.compile(rb"(\w{1,64}): opCount ([0-9a-f]{1,16}) ")

OPERATION_TAIL: Final = re.compile(
    rb"sendbuff (" + _POINTER + rb") recvbuff (" + _POINTER + rb")"
    rb"(?: acc (?:" + _POINTER + rb"))?"  # one fork
    rb" count (\d{1,20}) datatype (-?\d{1,5}) op (-?\d{1,10}) root (-?\d{1,10})"
    rb" comm (0x[0-9a-f]{1,16}) \[nranks=(\d{1,10})\] stream (" + _POINTER + rb")"
    rb"(?: task -?\d{1,10} globalrank (-?\d{1,10}))?"  # RCCL
)
"""What follows `opCount N `: the part that recurs, and that templates are made of."""


def has_fragment(text: bytes) -> bool:
    """Whether a piece of an operation line stands here: only operation lines hold these words."""
    return b": opCount " in text or b"buff 0x" in text or b"buff (nil)" in text or b" [nranks=" in text


TUNING: Final = re.compile(
    rb"(?:(\w{1,64})(?: \[(?:Symmetric|Copy Engine|Hierarchical CE)\])?: )?(\d{1,20}) Bytes -> "
    rb"(?:Algo (\w{1,32}) proto (\w{1,32})(?: time (\d{1,18}\.\d{6})| channel\{Lo\.\.Hi\}=\{(\d{1,4})\.\.(-?\d{1,4})\})"
    rb"|Kernel \w{1,128} nchannels (\d{1,4}) nthreads \d{1,5}(?: nWorks \d{1,6})?"
    rb"|cudaMemcpy(?:; CE synchronization with NVLS)?"
    rb"|RMA proxy \+ CE)"
)
"""The TUNING line in all its forms, NCCL 2.20 to 2.30; without a name before 2.23."""

TUNING_FRAGMENT: Final = re.compile(rb"\d Bytes -> ")

INIT: Final = re.compile(
    rb"(?:\[Rank \d{1,10}\] )?(?:(ncclComm\w{1,64}) )?comm (0x[0-9a-f]{1,16})"
    rb" rank (-?\d{1,10}) n[rR]anks (-?\d{1,10}) cudaDev (-?\d{1,10})"
    rb"(?: nvmlDev (-?\d{1,10}))?(?: busId ([0-9a-f]{1,16}))?"
    rb"(?: parent (0x[0-9a-f]{1,16})(?: (?:split|child)Count (-?\d{1,10}))? color (-?\d{1,10}) key (-?\d{1,10}))?"
    rb"(?: commId 0x([0-9a-f]{1,16}))?"
    rb" ?- (Init START|Init COMPLETE|Destroy COMPLETE|Abort START|Abort COMPLETE)"
)
"""The life of a communicator: with and without commId, nvmlDev, busId, parent and entry point."""

VERSION: Final = re.compile(
    rb"NCCL version (\d{1,4}\.\d{1,4}\.\d{1,4}(?:[-.]\w{1,32}(?::\w{1,40})?)?)"
    rb"(?:\+cuda([\w.]{1,32}?))?(?=\s|$|NCCL version )"
)
"""`NCCL version 2.28.3+cuda12.9`: bare up to 2.21, a message of an INFO line later."""

LAUNCHER_TAG: Final = re.compile(
    rb"(?:\w{3} \w{3} [ \d]\d \d\d:\d\d:\d\d \d{4}(?=\[))?"  # mpirun --timestamp-output
    rb"(?:\[[\w,.@|/-]{1,80}\](?:<\w{1,16}>)?+:?+ ?+|\(\w[^()]{0,120}\) ?+|[\w.@-]{1,80}: ?+"
    rb"|[ \t]{1,16}+|\x1b\[[\d;]{0,8}m){0,8}"
)
"""What mpirun, srun -l, torchrun, pdsh, kubectl and Ray put in front of each line, also several of them. Possessive,
because a line of blanks would be taken apart in billions of ways."""
