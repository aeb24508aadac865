"""A job as NCCL's logs print it: communicators with system blocks, and what a pipeline knows of them."""

from __future__ import annotations

from dataclasses import dataclass, field

from topology_samples import printed

from ncclscope_agent.sources.nccl_log.reader import NcclLogReader
from ncclscope_service.pipeline import Pipeline
from ncclscope_service.store.tables import Store
from ncclscope_wire.batch import Batch
from ncclscope_wire.records import Source, SourceKind
from ncclscope_wire.topology import TopologySeen

BUS_IDS = ("1000", "25000", "c1000", "e1000")


@dataclass(slots=True)
class PrintedJob:
    """Logs of hosts with four GPUs each, one process per GPU, in one file per host."""

    logs: dict[str, str] = field(default_factory=dict[str, str])
    operations: int = 0

    def say(self, host: str, device: int, text: str) -> None:
        """One line of the process on a GPU."""
        line = f"{host}:{100 + device}:{200 + device} [{device}] NCCL INFO {text}\n"
        self.logs[host] = self.logs.get(host, "") + line

    def communicator(
        self, number: int, ranks: list[tuple[str, int]], *, blocks: dict[str, str] | None = None, table: str = ""
    ) -> None:
        """Makes a communicator of these (host, device); each rank prints its host's block."""
        for rank, (host, device) in enumerate(ranks):
            of = f"ncclCommInitRank comm 0x{number:x}000 rank {rank} nranks {len(ranks)} cudaDev {device} "
            of += f"nvmlDev {device} busId {BUS_IDS[device]} commId 0x{number:x}"
            self.say(host, device, f"{of} - Init START")
            if blocks and host in blocks:
                self.logs[host] += printed(blocks[host], host, 100 + device, 200 + device)
            if rank == 0 and table:
                self.logs[host] += printed(table, host, 100 + device, 200 + device)
            self.say(host, device, f"{of} - Init COMPLETE")

    def operation(self, number: int, place: tuple[str, int], ranks: int, op: str = "AllReduce", peer: int = 0) -> None:
        """One operation of 1 MiB on one rank."""
        text = f"{op}: opCount 0 sendbuff 0x7f0000000000 recvbuff 0x7f0000000000 count 262144 datatype 7 op 0 "
        text += f"root {peer} comm 0x{number:x}000 [nranks={ranks}] stream 0x55d0"
        self.say(*place, text)

    def store(self, *topologies: TopologySeen) -> Store:
        """What a pipeline knows once it has read all logs, and these topology files."""
        pipeline = Pipeline()
        for host, text in sorted(self.logs.items()):
            reader = NcclLogReader(Source(kind=SourceKind.NCCL_LOG, name=host, key=host))
            for batch in [*reader.ingest_bytes(text.encode()), *reader.finish()]:
                pipeline.ingest_batch(batch, agent="a", session="s", job="job")
        source = Source(kind=SourceKind.NCCL_TOPOLOGY, name="topo.xml", key="topo.xml")
        for seen in topologies:
            batch = Batch(source=source, begin=0, end=1, is_last=True, topologies=(seen,))
            pipeline.ingest_batch(batch, agent="a", session="s", job="job")
        pipeline.finish(0)
        return pipeline.store
