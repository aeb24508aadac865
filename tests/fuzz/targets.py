"""Everything that reads what others wrote: seeds, and what must hold for any bytes.

`fuzz_inputs.py` drives them with atheris, `test_targets.py` with mutations that hypothesis draws. Checks raise nothing
but what is wrong: the errors that a reader may answer with are caught here.
"""

from __future__ import annotations

import gzip
import json
import pickle
import tempfile
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Final

import anyio
import httpx
from agent.flight_samples import as_pytorch_pickles, dump, entry
from agent.inspector_samples import coll_perf, dump_v43, record
from agent.ras_server import json_status, missing, rank, text_status
from agent.trace_samples import trace
from fuzz.kept_targets import KEPT_TARGETS
from fuzz.target import Target
from fuzz.text_targets import TEXT_TARGETS
from nsys_made import nccl_export
from service import fake_service
from wire.sample_batches import HELLO, log_batch, with_right_checksum

from ncclscope.config_file import keys_of_agent, read_table
from ncclscope_agent.sources.flight_recorder.dump import read_dump
from ncclscope_agent.sources.inspector import InspectorReader
from ncclscope_agent.sources.kineto.batches import read_trace
from ncclscope_agent.sources.nsys.export import read_export
from ncclscope_agent.sources.ras import LOOKS, RasWatch, read_answer
from ncclscope_agent.sources.topology_xml import read_topology_xml
from ncclscope_service.auth.access import parse_access
from ncclscope_service.intake.receive import Receiver
from ncclscope_service.pipeline import Pipeline
from ncclscope_service.serve.routes import make_app
from ncclscope_service.store.settings import PipelineSettings
from ncclscope_wire.batch import Batch
from ncclscope_wire.codec import decode_message, encode_message
from ncclscope_wire.errors import ConfigError, FormatError, ProtocolError, SourceError
from ncclscope_wire.frame import encode_frame
from ncclscope_wire.messages import AgentHealth, BatchMessage, Heartbeat, Message
from ncclscope_wire.records import Source, SourceKind


def check_wire(data: bytes) -> None:
    """A frame's payload is a message or ProtocolError; one after a hello is answered, and what it brings is applied."""
    with suppress(ProtocolError):
        decode_message(data)
    data = with_right_checksum(data)
    receiver, pipeline = Receiver(), Pipeline(PipelineSettings())
    receiver.open(1)
    receiver.on_bytes(1, encode_frame(encode_message(HELLO)), 0)
    for received in receiver.on_bytes(1, encode_frame(data), 0).received:
        pipeline.ingest_batch(received.batch, agent=received.agent, session=received.session, job=received.job)
    pipeline.process_backlog(1_000_000_000)
    pipeline.finish(2_000_000_000)
    assert receiver.on_disconnected(1) is not None or receiver.statistics().faults


def wire_seeds() -> list[bytes]:
    """Messages of each kind."""
    batches = [
        log_batch(0, 5, strings=("AllReduce", "h"), templates=2, operations=((0, 1), (1, 2))),
        *_export_batches(),
    ]
    messages: list[Message] = [HELLO, Heartbeat(agent_wall_ns=1, health=AgentHealth(skipped={"a": 1}))]
    return [
        *map(encode_message, messages),
        *(encode_message(BatchMessage(sequence=1, batch=batch)) for batch in batches),
    ]


def _export_batches() -> list[Batch]:
    with tempfile.TemporaryDirectory() as folder:
        path = nccl_export().write(Path(folder) / "e.sqlite")
        return list(read_export(path, source=Source(kind=SourceKind.NSYS, name="e", key="k"), host=None))


def check_nsys(data: bytes) -> None:
    """A file is an export or SourceError."""
    with tempfile.TemporaryDirectory() as folder, suppress(SourceError):
        path = Path(folder) / "e.sqlite"
        path.write_bytes(data)
        source = Source(kind=SourceKind.NSYS, name="e", key="k")
        for batch in read_export(path, source=source, host=None, logged=frozenset()):
            decode_message(encode_message(BatchMessage(sequence=1, batch=batch)))


def nsys_seeds() -> list[bytes]:
    """A small export."""
    with tempfile.TemporaryDirectory() as folder:
        return [nccl_export().write(Path(folder) / "e.sqlite").read_bytes()]


def check_inspector(data: bytes) -> None:
    """Any bytes give batches that the wire takes."""
    reader = InspectorReader(Source(kind=SourceKind.INSPECTOR, name="d", key="k"), max_line_bytes=4096)
    for batch in [*reader.ingest_bytes(data, 0), *reader.finish(0)]:
        decode_message(encode_message(BatchMessage(sequence=1, batch=batch)))


def inspector_seeds() -> list[bytes]:
    """Dumps of both forms."""
    times = '{"kernel_start_ts":1752867229235059,"kernel_stop_ts":1752867229235069}'
    verbose = f',"event_trace_ts":{{"coll_start_ts":1752867229235050,"kernel_events":[{times}]}}'
    return [record(coll_perf(1, more=verbose)).encode() + b"\n", "\n".join(dump_v43(3)).encode()]


def check_trace(data: bytes) -> None:
    """Any bytes give batches that the wire takes."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "t.json"
        path.write_bytes(data)
        for batch in read_trace(path, source=Source(kind=SourceKind.KINETO, name="t", key="k")):
            decode_message(encode_message(BatchMessage(sequence=1, batch=batch)))


def trace_seeds() -> list[bytes]:
    """A trace of PyTorch, as text and packed."""
    told = trace(hostname="node1.cluster", deviceProperties=[{"id": 0, "name": "NVIDIA H100"}])
    return [told, gzip.compress(told)]


def check_ras(data: bytes) -> None:
    """Any answer gives facts that the wire takes, or FormatError."""
    watch = RasWatch()
    with suppress(FormatError):
        facts = [fact for _ in range(LOOKS) for fact in watch.ingest_answer(read_answer(data), 1)]
        batch = Batch(source=Source(kind=SourceKind.RAS, name="r", key="k"), begin=0, end=1, facts=tuple(facts))
        sent = decode_message(encode_message(BatchMessage(sequence=1, batch=batch)))
        assert isinstance(sent, BatchMessage)
        assert len(sent.batch.facts) == len(facts)


def ras_seeds() -> list[bytes]:
    """Answers in both forms with every trouble."""
    ranks = [rank(number, AllReduce=number // 3) for number in range(4)]
    text = "".join(
        ("DEAD\n  1 job process is considered dead\n  Process 7 on node 10.0.0.1 managing GPU 7\n\n", MISMATCH)
    )
    return [
        json_status(("0xc0ffee", ranks, [missing(4), missing(5, dead=True)])),
        text_status("2.27.5", text, MISMATCH),
    ]


MISMATCH: Final = (
    "#0-0 (27a079b828ff1a75) MISMATCH\n  Communicator ranks have different AllReduce operation counts\n"
    "  31 ranks have launched up to operation 6650\n"
    "  Rank 5 has launched up to operation 6649 -- GPU 5 managed by process 483077 on node 172.16.64.210\n\n"
)


def check_dump(data: bytes) -> None:
    """A dump of PyTorch's Flight Recorder gives records that the wire takes, or FormatError."""
    with suppress(FormatError):
        facts = tuple(read_dump(data, "rank_1"))
        batch = Batch(source=Source(kind=SourceKind.FLIGHT_RECORDER, name="d", key="k"), begin=0, end=1, facts=facts)
        decode_message(encode_message(BatchMessage(sequence=1, batch=batch)))


def dump_seeds() -> list[bytes]:
    """A dump in each form."""
    content = dump(entry(1), entry(2, "started"))
    return [as_pytorch_pickles(content), pickle.dumps(content, 5), json.dumps(content).encode()]


def check_topology(data: bytes) -> None:
    """Any bytes are a topology or FormatError."""
    with suppress(FormatError):
        read_topology_xml(data, "node1")


def topology_seeds() -> list[bytes]:
    """A host with a bridge, a GPU and a card."""
    inside = (
        '<pci busid="0000:02:00.0" class="0x060400" link_speed="16.0 GT/s PCIe" link_width="16">'
        '<pci busid="0000:03:00.0" class="0x030200" link_speed="16.0 GT/s PCIe" link_width="16"><gpu dev="0" sm="80" '
        'rank="7"><nvlink target="0000:00:00.0" count="12" tclass="0x068000"/></gpu></pci><pci busid="0000:05:00.0" '
        'class="0x020000" link_speed="8.0 GT/s PCIe" link_width="16"><nic><net name="mlx5_0" dev="0" speed="200000"/>'
        "</nic></pci></pci>"
    )
    cpu = f'<cpu numaid="0" affinity="ff" arch="x86_64" vendor="AuthenticAMD" familyid="25" modelid="1">{inside}</cpu>'
    return [f'<system version="1">\n{cpu}</system>'.encode()]


def check_config(data: bytes) -> None:
    """Any file is a configuration or ConfigError."""
    with tempfile.TemporaryDirectory() as folder, suppress(ConfigError):
        path = Path(folder) / "c.toml"
        path.write_bytes(data)
        read_table(path, "agent", keys_of_agent())


def config_seeds() -> list[bytes]:
    """A right file and a wrong one."""
    return [b'[agent]\nlogs = ["a", "b"]\nwindow-bytes = 70000\ntls = true\n', b"[agent]\nx.y = 1\n'a b' = 2\n[c]\n"]


def check_access(data: bytes) -> None:
    """Any text is a list of tokens or ConfigError."""
    with suppress(ConfigError):
        known = parse_access(data.decode("utf-8", "replace"), where="f")
        assert len(known) > 0
        assert known.grant_for_token("a token that is in no list") is None


def access_seeds() -> list[bytes]:
    """Lines of each kind."""
    return [b"0123456789abcdef name=a job=x*,y host=n? role=write # r\ncert:node1 host=node1\n"]


def check_api(data: bytes) -> None:
    """Any path and query is answered, and never with a mistake of ours."""
    target = data.decode("latin-1")
    url = "/" + "".join(char if char.isprintable() and char.isascii() else f"%{ord(char):02x}" for char in target)

    async def ask() -> int:
        transport = httpx.ASGITransport(make_app(_fake(), _fake().hub))
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
            try:
                return (await client.get(url)).status_code
            except httpx.InvalidURL:
                return 400

    if not url.startswith("/api/events") and not url.startswith("//"):  # an endless answer; another host
        assert anyio.run(ask) < 500, url


@cache
def _fake() -> fake_service.FakeService:
    return fake_service.small(fake_service.FakeService())


def api_seeds() -> list[bytes]:
    """Paths with every parameter."""
    job = fake_service.JOB
    paths = [
        f"api/jobs/{job}/timeline?seconds=2&communicator=dp-0",
        f"api/jobs/{job}/timeline?rank=1&seconds=2",
        f"api/jobs/{job}/ranks/0",
        f"api/jobs/{job}/communicators/dp-0",
        f"api/jobs/{job}/sizes",
        f"api/findings?job={job}",
        "static/app.js",
        "metrics",
    ]
    return [path.encode() for path in paths]


TARGETS = {
    "wire": Target(check_wire, wire_seeds),
    "nsys": Target(check_nsys, nsys_seeds),
    "inspector": Target(check_inspector, inspector_seeds),
    "trace": Target(check_trace, trace_seeds),
    "ras": Target(check_ras, ras_seeds),
    "dump": Target(check_dump, dump_seeds),
    "topology": Target(check_topology, topology_seeds),
    "config": Target(check_config, config_seeds),
    "access": Target(check_access, access_seeds),
    "api": Target(check_api, api_seeds),
    **KEPT_TARGETS,
    **TEXT_TARGETS,
}
