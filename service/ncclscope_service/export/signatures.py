"""The communication signatures of what is selected, by communicator: plain tables for files and reports."""

from __future__ import annotations

from typing import Final

import numpy as np

from ncclscope_service.distinct import groups
from ncclscope_service.export.selection import Selection
from ncclscope_service.signature import Signature, Traffic, signature_of
from ncclscope_wire.terms import NO_TIME_NS, OPERATIONS

MAX_OPERATIONS: Final = 4_000_000
"""Operations that are looked at: the latest. Bounds memory to half a gigabyte."""

_NAMES: Final = [operation.name for operation in OPERATIONS]


def signatures(selection: Selection) -> dict[int, Signature]:
    """By communicator index; communicators without an operation have none."""
    store, part = selection.store, selection.operations
    latest = slice(max(0, len(part) - MAX_OPERATIONS), None)
    columns = {
        name: part.column(name)[latest]
        for name in ("member", "template", "message_bytes", "iteration", "start_ns", "end_ns", "logged_at_ns")
    }
    communicator_of = np.asarray([member.communicator for member in store.members], np.int64)
    members = columns["member"].astype(np.intp)
    communicators = np.where(members >= 0, communicator_of[members] if len(communicator_of) else -1, -1)
    codes = store.operation_templates.rows["op"][columns["template"].astype(np.intp)].astype(np.int64)
    starts = np.where(columns["start_ns"] == NO_TIME_NS, columns["logged_at_ns"], columns["start_ns"])
    return {
        communicator: signature_of(
            Traffic(
                rank=members[mine].astype(np.int64),
                op=codes[mine],
                message_bytes=columns["message_bytes"][mine].astype(np.int64),
                iteration=columns["iteration"][mine].astype(np.int64),
                start_ns=starts[mine].astype(np.int64),
                end_ns=columns["end_ns"][mine].astype(np.int64),
            )
        )
        for communicator, mine in groups(communicators)
        if communicator >= 0
    }


def mix_of(signature: Signature | None) -> list[dict[str, object]] | None:
    """The operation mix with names, most operations first."""
    if signature is None:
        return None
    return [{"op": op_name(op), "operations": amount, "bytes": moved} for op, amount, moved in signature.mix]


def op_name(code: int) -> str | None:
    """The operation's name; None for one that is not known."""
    return _NAMES[code] if code < len(_NAMES) else None
