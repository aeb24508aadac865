"""Payloads from the JSON export beside a SQLite export without a column for them."""

from __future__ import annotations

import base64
import json
import struct
from pathlib import Path

import numpy as np
import pytest
from nsys_made import nccl_export

from ncclscope_agent.sources.nsys.export import read_export
from ncclscope_wire.batch import Columns
from ncclscope_wire.records import Source, SourceKind
from ncclscope_wire.terms import NO_NUMBER

HASH, SIZE = 0xDEAD_BEEF_0BAD_CAFE, 4096
THREAD = (1 << 48) | (100 << 24) | 101


def event(start: int, payload: bytes, schema: int = (1 << 24) + 5) -> str:
    """A range as nsys 2022.4 and 2023.4 write it."""
    told = {"BinaryData": [{"SchemaId": str(schema), "Data": base64.b64encode(payload).decode()}]}
    nvtx = {
        "Type": 59,
        "Timestamp": str(start),
        "Payload": told,
        "GlobalTid": str(THREAD),
        "TextId": 31,
        "NsTime": True,
    }
    return json.dumps({"Type": 59, "NvtxEvent": nvtx}, separators=(",", ":"))


def templates(path: Path) -> Columns:
    source = Source(kind=SourceKind.NSYS, name=path.name, key="e")
    return np.concatenate([batch.range_templates for batch in read_export(path, source=source)])


def exported(folder: Path, lines: list[str] | None) -> Columns:
    made = nccl_export()
    made.range("NCCL", -900, None, kind=75, domain=2)
    for start in (250, 500):
        made.range("ncclAllReduce", start, start + 100, domain=2)
    path = made.write(folder / "e.sqlite")
    if lines is not None:
        (folder / "e.json").write_text("\n".join(lines) + "\n")
    return templates(path)


def test_ranges_have_the_payload_of_the_event_that_begins_with_them(tmp_path: Path) -> None:
    strings = json.dumps({"data": ["x" * 200_000, '"BinaryData"']})
    lines = [
        strings,
        event(250, struct.pack("<QQQ", HASH, SIZE, 0)),
        event(500, struct.pack("<QQQ", HASH, 2 * SIZE, 0)),
    ]
    found = exported(tmp_path, lines)
    assert found["communicator"].tolist() == [HASH, HASH]
    assert found["bytes"].tolist() == [SIZE, 2 * SIZE]


@pytest.mark.parametrize(
    "line",
    [
        '{"Type":59,"NvtxEvent":{"Payload":{"BinaryData":[]}}}',
        event(250, bytes(8))[:-9] + '"BinaryData"',
        event(250, bytes(8)).replace(f'"{THREAD}"', '"many"'),
        event(250, bytes(100)),
        event(250, struct.pack("<QQQ", HASH, SIZE, 0), schema=7),
        event(2**70, bytes(8)),
    ],
)
def test_what_is_no_payload_of_nccl_tells_nothing(tmp_path: Path, line: str) -> None:
    found = exported(tmp_path, [line])
    assert found["communicator"].tolist() == [0]
    assert found["bytes"].tolist() == [NO_NUMBER]


def test_without_such_an_export_ranges_have_no_payload(tmp_path: Path) -> None:
    assert exported(tmp_path, None)["bytes"].tolist() == [NO_NUMBER]


@pytest.mark.corpus
@pytest.mark.parametrize("version", ["local-nsys-2022", "local-nsys-2023.4"])
def test_payloads_of_real_exports_are_those_that_their_program_gave(corpus: Path, version: str) -> None:
    folder = corpus / "nsys" / version / "nccl_like_profile"
    found = templates(folder / "nccl.sqlite")
    told = found[found["bytes"] != NO_NUMBER]
    assert len(told) > 0
    events = [
        json.loads(line)["NvtxEvent"]
        for line in (folder / "nccl.json").read_text().splitlines()
        if line.startswith('{"Type":59') and "BinaryData" in line
    ]
    given = {base64.b64decode(blob["Data"])[:16] for one in events for blob in one["Payload"]["BinaryData"]}
    for row in told:
        assert struct.pack("<QQ", int(row["communicator"]), int(row["bytes"])) in given
