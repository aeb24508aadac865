"""What launchers and applications do to a log, and what is read of it all the same."""

from __future__ import annotations

import pytest
from agent.log_samples import NODE, SOURCE, operation_line, read_log

from ncclscope_agent.sources.nccl_log.reader import NcclLogReader

OTHER = "node17:41820:41901 [0] NCCL INFO "
INIT = f"{NODE}comm 0x55d0c8b3e2a0 rank 2 nranks 4 cudaDev 2 busId 81000 - Init COMPLETE"
NETWORK = NODE + "Using network IB"
CRI = "2026-03-02T11:20:33.123456789Z stdout F "


def lines(*texts: str) -> bytes:
    return "".join(text + "\n" for text in texts).encode()


@pytest.mark.parametrize(
    ("launcher", "tag"),
    [
        ("torchrun", "[default0]:"),
        ("torchrun --tee", "[trainer0|3]:"),
        ("torchrun, rank", "[rank12]: "),
        ("torchrun over srun", "3: [default0]:"),
        ("srun -l", "0: "),
        ("srun -l, padded", " 12: "),
        ("mpirun --tag-output", "[1,2]<stdout>:"),
        ("mpirun --tag-output, 5.0", "[prterun-node17-4711@1,2]<stdout>: "),
        ("mpirun --timestamp-output", "Mon Mar  2 11:20:33 2026[1,2]<stderr>:"),
        ("pdsh", "node17: "),
        ("pdsh, DeepSpeed", "10.0.0.17: "),
        ("Ray", "(pid=77) "),
        ("Ray actor", "(RayTrainWorker pid=77, ip=10.0.0.17) "),
        ("Ray, coloured", "\x1b[36m(RayTrainWorker pid=77)\x1b[0m "),
        ("Ray, two layers", "\x1b[36m(TrainController pid=70)\x1b[0m (RayTrainWorker pid=77, ip=10.0.0.17) "),
        ("Kubernetes CRI", CRI),
        ("Kubernetes CRI, local time", "2026-03-02T11:20:33.1+02:00 stderr F "),
        ("Kubernetes CRI over torchrun", CRI + "[default0]:"),
        ("kubectl logs --prefix", "[pod/trainer-0/main] "),
    ],
)
def test_each_launchers_tag_is_taken_off(launcher: str, tag: str) -> None:
    texts = [INIT, NETWORK, operation_line(), operation_line(op_count="20"), operation_line(count=7)]
    log = read_log(lines(*(tag + text for text in texts)))
    assert [operation["host"] for operation in log.operations] == ["node17"] * 3, launcher
    assert [operation["line"] for operation in log.operations] == [3, 4, 5]
    assert log.understood == {"init": 1, "network": 1, "operation": 3}
    assert not log.skipped


@pytest.mark.parametrize("tag", ["[default0]:", CRI, "\x1b[36m(W pid=7)\x1b[0m "])
def test_behind_a_tag_the_hosts_are_learnt_so_that_torn_lines_are_recovered(tag: str) -> None:
    torn = NODE + "Recv: opCount 173 sendbuff (nil) recvbuff 0x7f4d53016000 count 1024 datatype 2 op"
    log = read_log(lines(tag + INIT, tag + torn + operation_line(prefix=OTHER)))
    assert [operation["pid"] for operation in log.operations] == [41820]
    assert log.skipped == {"torn": 1}


def test_a_time_stamp_of_the_container_runtime_is_not_the_records() -> None:
    log = read_log(lines(CRI + operation_line(), CRI + "[2026-03-02 11:20:34] " + operation_line()))
    assert [operation["logged_at_ns"] for operation in log.operations] == [None, 1_772_450_434_000_000_000]


def test_parts_of_a_line_that_the_container_runtime_cut_are_joined() -> None:
    text = operation_line()
    part = CRI.replace(" F ", " P ")
    error = CRI.replace("stdout", "stderr")
    log = read_log(lines(part + text[:50], part + text[50:70], error + NETWORK, CRI + text[70:]))
    assert [(operation["host"], operation["line"]) for operation in log.operations] == [("node17", 4)]
    assert log.understood == {"network": 1, "operation": 1}
    assert log.skipped == {"continued": 2}


def test_parts_without_an_end_are_bounded() -> None:
    part = CRI.replace(" F ", " P ") + "x" * 1000
    log = read_log(lines(*[part] * 100, CRI + "x"), reader=NcclLogReader(SOURCE, max_line_bytes=4096))
    assert log.skipped == {"continued": 100, "too_long": 1}


@pytest.mark.parametrize(
    "suffix",
    [
        " [repeated 7x across cluster]",
        "\x1b[32m [repeated 7x across cluster]\x1b[0m",
        "\x1b[32m [repeated 7x across cluster] (Ray deduplicates logs by default. Set RAY_DEDUP_LOGS=0 to disable log "
        "deduplication, or see https://docs.ray.io/ for more options.)\x1b[0m",
    ],
)
def test_what_ray_left_out_is_counted_and_what_it_printed_is_read(suffix: str) -> None:
    tag = "\x1b[36m(RayTrainWorker pid=77, ip=10.0.0.17)\x1b[0m "
    log = read_log(lines(tag + operation_line() + suffix, tag + NETWORK + suffix))
    assert log.understood == {"operation": 1, "network": 1}
    assert log.skipped == {"repeated": 14}
    assert log.operations[0]["stream"] == 0x55D0C7F01B10


@pytest.mark.parametrize(
    "glued",
    [
        "  45%|####5     | 450/1000 [00:31<00:38, 14.27it/s]",
        "Epoch 3:  12%|█▏        | 12/100 [00:01<00:12,  7.1it/s, loss=2.41]",
        "\r 45%|####5     | 450/1000 [00:31<00:38, 14.27it/s]\r 46%|####6     | 460/1000 [00:32<00:37, 14.3it/s]",
        "    33554432       8388608     float     sum      -1    412.3   81.38  122.07      0 ",
        "step 12 loss 3.41",
        "iteration 12/ 1000 | elapsed time per iteration (ms): 812.3 | ",
        "INFO:root:saving",
    ],
)
def test_progress_bars_and_result_rows_glued_in_front_are_passed_over(glued: str) -> None:
    log = read_log(lines(INIT, glued + operation_line()))
    assert [(operation["host"], operation["line"]) for operation in log.operations] == [("node17", 2)]


@pytest.mark.parametrize("glued", ["14.27it/s", "step 5"])
def test_a_host_that_cannot_be_told_from_text_in_front_is_not_invented(glued: str) -> None:
    log = read_log(lines(glued + operation_line()))
    assert [operation["host"] for operation in log.operations] in ([], ["node17"])
    assert log.operations or log.skipped["torn"] == 1


def test_three_processes_tear_a_line_and_each_whole_record_is_read_once() -> None:
    whole = [operation_line("Send", prefix=f"node17:{pid}:{pid} [0] NCCL INFO ", stream="(nil)") for pid in (7, 8, 9)]
    log = read_log(lines(INIT, whole[0] + whole[1] + whole[2][:90] + whole[0], whole[2]))
    assert [operation["pid"] for operation in log.operations] == [7, 8, 7, 9]
    assert log.skipped == {"torn": 1}


def test_the_tail_of_a_torn_record_is_not_joined_to_a_head() -> None:
    """Processes that share a file overwrite each other: head and tail may be of two records."""
    first, second = operation_line(count=1), operation_line(count=2, prefix=OTHER)
    log = read_log(lines(INIT, first[:120] + second, first[120:]))
    assert [operation["count"] for operation in log.operations] == [2]
    assert log.skipped == {"torn": 2}


def test_a_line_of_blanks_in_front_of_a_record_is_read_in_no_time() -> None:
    """Found by fuzzing: blanks could be taken apart in as many ways as there are."""
    line = "[1,0]" + "\t" * 65 + "<stdout>:node17:[1,1]<stdout>:node17:41822:41903 [2] NCCL INFO Using network IB\n"
    assert read_log(line.encode() * 3).end_line == 3
