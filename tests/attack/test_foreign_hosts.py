"""An agent whose token is for some hosts writes rows about another: they leave with the records that name it."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from service.intake.test_admission import TRAIN, access, hello, opened, say
from service.log_batches import BASE_NS, Kernel, Line, Mark, Tuning, export_batch, init, log_batch

from ncclscope_service.intake.admission import Admission
from ncclscope_service.intake.receive import Receiver
from ncclscope_service.pipeline import Pipeline
from ncclscope_wire.batch import Batch
from ncclscope_wire.messages import BatchMessage


def _of_two_hosts() -> tuple[Batch, Batch]:
    """A log and an export that an agent of node1 sends: half of each is about another host."""
    log = log_batch(
        [Line(line=1, tid=11), Line(line=2, tid=12), Line(line=3, tid=12)],
        events=[init(line=0, pointer=0xB0, host="victim")],
        tunings=[Tuning(line=4, bytes=8, tid=12)],
    )
    threads = log.threads.copy()
    threads["host"] = [0, len(log.strings)]
    log = replace(log, strings=(*log.strings, "victim"), threads=threads)
    kernels = [Kernel(start_ns=BASE_NS, end_ns=BASE_NS + 9), Kernel(start_ns=BASE_NS, end_ns=BASE_NS + 7)]
    export = export_batch(kernels, marks=[Mark(text="step", start_ns=BASE_NS)])
    templates = export.kernel_templates.copy()
    templates["host"] = [0, len(export.strings)]
    marks = export.range_templates.copy()
    marks["host"] = len(export.strings)
    return log, replace(export, strings=(*export.strings, "victim"), kernel_templates=templates, range_templates=marks)


def test_rows_about_a_foreign_host_are_counted_and_nothing_is_left_of_them() -> None:
    receiver = Receiver(admission=Admission(access(f"{TRAIN} host=node1")))
    opened(receiver, 1, hello(TRAIN))
    pipeline = Pipeline()
    for number, batch in enumerate(_of_two_hosts()):
        (received,) = say(receiver, 1, BatchMessage(sequence=number + 1, batch=batch))[0].received
        assert pipeline.ingest_batch(received.batch, agent="a", session="s", job="j")
    pipeline.finish(BASE_NS)
    known = pipeline.store
    assert "victim" not in repr(known.processes) + repr(known.strings.values)
    assert known.operations.rows["line"].tolist() == [1]
    assert known.kernels.rows["end_ns"].tolist() == [BASE_NS + 9]
    assert len(known.ranges) == 0
    hosts = np.array([process.host for process in known.processes])
    assert set(hosts[known.operations.rows["process"]]) == {"node1"}
    rows, names, records = 5, 2, 1
    assert known.skipped["foreign_host"] == rows + names + records
