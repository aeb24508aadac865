"""Operations from an export alone: NCCL's calls by the payloads of its NVTX ranges, for processes without a log.

Scope: payloads that name the communicator (NCCL 2.25 on). They say bytes, root or peer and the communicator's hash, and
neither data type, reduction nor opCount. Sizes and ranks of communicators come from the ranges that make or destroy
them; a split's own range says those of its parent. Where an export has none of these, other exports of the process may.
*Source:* NCCL `src/include/nvtx_payload_schemas.h`, `src/init.cc`, `src/collectives.cc`, 2.25 to 2.30.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Final

import numpy as np

from ncclscope_agent.sources.dictionaries import Strings, Threads
from ncclscope_agent.sources.nsys.nvtx_payload import MEMBER_FUNCTIONS, Call, read_call, read_member
from ncclscope_agent.sources.nsys.rows import Chunk, RangeRow
from ncclscope_agent.sources.nsys.schema import Session, pid_of
from ncclscope_wire import tables
from ncclscope_wire.batch import Columns
from ncclscope_wire.records import CommunicatorEvent, CommunicatorEventKind
from ncclscope_wire.terms import DATA_TYPES, NO_NUMBER, OPERATION_CODES

_BYTES: Final = next(number for number, data_type in enumerate(DATA_TYPES) if data_type.name == "uint8")
_CODES: Final = {f"nccl{name}": code for name, code in OPERATION_CODES.items()}
_STREAM_MASK: Final = 2**48 - 1


class CallColumns:
    """Turns NVTX rows of NCCL's domain into operations; those of other domains and functions give none."""

    def __init__(
        self,
        host: str,
        domains: Mapping[tuple[int, int], str],
        session: Session,
        strings: Strings,
        logged: frozenset[int],
        *,
        limit: int,
    ) -> None:
        """`logged`: processes whose calls a log has; `limit`: distinct calls, beyond which they are dropped."""
        self._host = host
        self._domains = domains
        self._session = session
        self._strings = strings
        self.threads = Threads(strings)
        self._logged = logged
        self._limit = limit
        self._templates: dict[tuple[int, str, Call], int] = {}
        self._line = 0

    def chunk_of(self, rows: Sequence[RangeRow]) -> Chunk:
        """OPERATION_TEMPLATE and OPERATION_ROW of one chunk; lines count the calls of the export."""
        known = len(self._templates)
        found: list[tuple[int, int]] = []
        dropped = 0
        for thread, domain, text, _, start, _, payload in rows:
            if text in _CODES and self._is_ours(thread, domain) and (call := read_call(text, payload)) is not None:
                template = self._template(thread, text, call)
                dropped += template is None
                if template is not None:
                    found.append((template, start + self._session.to_utc_ns))
        operations = np.zeros(len(found), tables.OPERATION_ROW)
        if found:
            operations["template"], operations["logged_at_ns"] = np.asarray(found, np.int64).T
            operations["line"] = np.arange(self._line + 1, self._line + 1 + len(found))
            self._line += len(found)
        return Chunk(templates=self._templates_since(known), rows=operations, dropped=dropped)

    def communicators(self, rows: Iterable[RangeRow]) -> list[CommunicatorEvent]:
        """The communicators that these ranges make, split or destroy, each once."""
        found: dict[tuple[int, int], CommunicatorEvent] = {}
        for thread, domain, text, _, _, _, payload in rows:
            member = read_member(text, payload) if text in MEMBER_FUNCTIONS else None
            if member is None or not self._is_ours(thread, domain):
                continue
            found[thread >> 24, member.communicator] = CommunicatorEvent(
                kind=CommunicatorEventKind.KNOWN,
                host=self._host,
                pid=pid_of(thread),
                tid=thread & 0xFFFFFF,
                line=0,
                pointer=member.communicator,
                rank=member.rank,
                nranks=member.nranks,
                cuda_device=member.cuda_device,
                comm_id=member.communicator,
            )
        return list(found.values())

    def _is_ours(self, thread: int, domain: int) -> bool:
        return pid_of(thread) not in self._logged and self._domains.get((thread >> 24, domain)) == "NCCL"

    def _template(self, thread: int, text: str, call: Call) -> int | None:
        key = (self.threads.index(self._host, pid_of(thread), thread & 0xFFFFFF), text, call)
        index = self._templates.get(key)
        if index is None and len(self._templates) < self._limit:
            index = self._templates[key] = len(self._templates)
        return index

    def _templates_since(self, known: int) -> Columns:
        keys = list(self._templates)[known:]
        return np.array(
            [
                (
                    *(thread, NO_NUMBER, _CODES[text], self._strings.index(text.removeprefix("nccl")), _BYTES),
                    *(NO_NUMBER, call.root, NO_NUMBER, call.bytes, 0, 0, call.communicator),
                    *(call.communicator & _STREAM_MASK, NO_NUMBER),
                )
                for thread, text, call in keys
            ],
            tables.OPERATION_TEMPLATE,
        )
