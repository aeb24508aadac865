"""The dashboard of one training job."""

from __future__ import annotations

from grafana_foundation_sdk.models import dashboard

from ncclscope_dashboards.board import JOB_VARIABLE, PARALLELISM_VARIABLE, Board
from ncclscope_dashboards.fleet import findings_table
from ncclscope_dashboards.panels import GOOD_IS_HIGH, NONE_IS_GOOD, WAIT, Query, buckets, lines, number, rows
from ncclscope_dashboards.queries import JOB, KIND, LARGE, TOGETHER, rate, wait_share


def job() -> Board:
    """One job."""
    return Board(
        uid="ncclscope-job",
        title="ncclscope / Job",
        description="One training job: bandwidth and efficiency by parallelism, what is moved, who waits, iterations.",
        variables=[JOB_VARIABLE, PARALLELISM_VARIABLE],
        rows=[
            ("Now", _job_numbers()),
            ("What is wrong", [findings_table()]),
            ("How fast, by parallelism", _job_speeds()),
            ("What is moved", _job_mix()),
            ("Waiting and iterations", _job_waits()),
            ("Communicators", [_slowest_table()]),
            ("Plan", _job_plan()),
            ("Beside NCCL Inspector", _job_inspector()),
        ],
    )


def _job_numbers() -> list[dashboard.Panel]:
    return [
        number(
            "Open findings",
            "Warnings and critical ones.",
            "short",
            f'sum(ncclscope_findings{{{JOB}, severity!="info"}})',
            steps=NONE_IS_GOOD,
        ),
        number(
            "Slowest group",
            "Bus bandwidth over the limit by topology, of the slowest group; large messages.",
            "percentunit",
            f'min(ncclscope_efficiency_ratio{{{KIND}, reference="topology", {LARGE}}})',
            steps=GOOD_IS_HIGH,
            decimals=0,
        ),
        number(
            "Waiting",
            "Share of kernel time that was waiting for the last rank; groups that span pipeline stages left out.",
            "percentunit",
            wait_share("", f"{KIND}, {TOGETHER}"),
            steps=WAIT,
            decimals=0,
        ),
        number(
            "Iteration",
            "Median of the recent iterations.",
            "s",
            f'max(ncclscope_iteration_seconds{{{JOB}, percentile="50"}})',
            decimals=2,
        ),
        number(
            "Exposed communication",
            "Share of an iteration in which a GPU ran NCCL kernels only.",
            "percentunit",
            f"max(ncclscope_exposed_communication_ratio{{{JOB}}})",
            steps=WAIT,
            decimals=0,
        ),
        number(
            "Captured",
            "Share of the last minutes that captures of kernels cover: what the rest rests on.",
            "percentunit",
            f"min(ncclscope_captured_ratio{{{JOB}}})",
            decimals=0,
        ),
    ]


def _job_speeds() -> list[dashboard.Panel]:
    busbw = f"ncclscope_busbw_bytes_per_second{{{KIND}, {LARGE}}}"
    return [
        lines(
            "Bus bandwidth",
            "Of the transfer, without the waiting: median over the groups of a kind, and the slowest of "
            "them, dashed. Large messages.",
            "Bps",
            Query(expr=f"quantile by (parallelism) (0.5, {busbw})", legend="{{parallelism}}"),
            Query(expr=f"min by (parallelism) ({busbw})", legend="{{parallelism}} slowest", is_dashed=True),
        ),
        lines(
            "Efficiency",
            "Bus bandwidth over a named reference: what the wires can do (topology), what was measured "
            "(baseline). The slowest group of a kind.",
            "percentunit",
            Query(
                expr=f"min by (parallelism, reference) (ncclscope_efficiency_ratio{{{KIND}, {LARGE}}})",
                legend="{{parallelism}} of {{reference}}",
            ),
        ),
        lines(
            "Five slowest groups",
            "By efficiency against the topology; large messages.",
            "percentunit",
            Query(
                expr=f'bottomk(5, ncclscope_efficiency_ratio{{{KIND}, reference="topology", {LARGE}}})',
                legend="{{communicator}} {{op}} {{size_class}}",
            ),
            is_table=True,
        ),
        lines(
            "Drift",
            "Bus bandwidth against the best that a series has shown: -0.2 is a fifth slower. The five that lost most.",
            "percentunit",
            Query(
                expr=f"bottomk(5, ncclscope_bandwidth_drift_ratio{{{KIND}, {LARGE}}})",
                legend="{{communicator}} {{op}} {{size_class}}",
            ),
            is_table=True,
            lowest=None,
        ),
    ]


def _job_mix() -> list[dashboard.Panel]:
    return [
        lines(
            "Bytes by operation",
            "Message bytes, over all ranks.",
            "Bps",
            Query(expr=f"sum by (op) ({rate('ncclscope_bytes_total', KIND)})", legend="{{op}}"),
            is_stacked=True,
            width=8,
        ),
        lines(
            "Bytes by parallelism",
            "Message bytes, over all ranks.",
            "Bps",
            Query(expr=f"sum by (parallelism) ({rate('ncclscope_bytes_total', KIND)})", legend="{{parallelism}}"),
            is_stacked=True,
            width=8,
        ),
        lines(
            "Operations by size",
            "Operations per second by message size (upper bound), over all ranks.",
            "ops",
            Query(expr=f"sum by (size_class) ({rate('ncclscope_operations_total', KIND)})", legend="{{size_class}}"),
            is_stacked=True,
            width=8,
        ),
        lines(
            "Operations by kind",
            "Operations per second, over all ranks.",
            "ops",
            Query(
                expr=f"sum by (op, parallelism) ({rate('ncclscope_operations_total', KIND)})",
                legend="{{op}} in {{parallelism}}",
            ),
            is_stacked=True,
        ),
        buckets(
            "Kernel time of collectives",
            "How long collectives ran, waiting included: number in each bucket.",
            "s",
            f"sum by (le) (increase(ncclscope_collective_duration_seconds_bucket{{{KIND}}}[$__rate_interval]))",
        ),
    ]


def _job_waits() -> list[dashboard.Panel]:
    duration = rate("ncclscope_collective_duration_seconds_bucket", KIND)
    waits = rate("ncclscope_collective_wait_seconds_bucket", KIND)
    transfer = rate("ncclscope_transfer_seconds_total", KIND)
    collectives = rate("ncclscope_collectives_total", KIND)
    return [
        lines(
            "Waiting by parallelism",
            "Share of kernel time that was waiting for the last rank. A pipeline waits by design.",
            "percentunit",
            Query(expr=wait_share("by (parallelism) ", KIND), legend="{{parallelism}}"),
            highest=1,
            width=8,
        ),
        lines(
            "Iteration time",
            "Median and 90th percentile of the recent iterations over all ranks.",
            "s",
            Query(expr=f"ncclscope_iteration_seconds{{{JOB}}}", legend="{{job}} p{{percentile}}"),
            width=8,
        ),
        lines(
            "Communication in an iteration",
            "Share of an iteration in which a GPU ran a NCCL kernel, and the part that no computation hid.",
            "percentunit",
            Query(expr=f"ncclscope_communication_ratio{{{JOB}}}", legend="{{job}} communicating"),
            Query(expr=f"ncclscope_exposed_communication_ratio{{{JOB}}}", legend="{{job}} exposed"),
            highest=1,
            width=8,
        ),
        lines(
            "Slow collectives",
            "99th percentile of the kernel time by operation, waiting included.",
            "s",
            Query(
                expr=f"histogram_quantile(0.99, sum by (le, op, parallelism) ({duration}))",
                legend="{{op}} in {{parallelism}}",
            ),
            width=8,
        ),
        lines(
            "Long waits",
            "99th percentile of the longest wait of any rank in one collective.",
            "s",
            Query(
                expr=f"histogram_quantile(0.99, sum by (le, op, parallelism) ({waits}))",
                legend="{{op}} in {{parallelism}}",
            ),
            width=8,
        ),
        lines(
            "Transfer",
            "Mean time of one collective from the last rank's arrival to the end.",
            "s",
            Query(
                expr=f"sum by (op, parallelism) ({transfer}) / sum by (op, parallelism) ({collectives})",
                legend="{{op}} in {{parallelism}}",
            ),
            width=8,
        ),
    ]


def _job_plan() -> list[dashboard.Panel]:
    """Of jobs that are held against a description (`serve --model`)."""
    step = f"{rate('ncclscope_step_seconds_total', JOB)} / {rate('ncclscope_steps_total', JOB)}"
    return [
        number(
            "Unexplained operations",
            "Of the last look: too many or missing by the job's description, for no known reason.",
            "short",
            f"sum(ncclscope_unexplained_operations{{{JOB}}})",
            steps=NONE_IS_GOOD,
        ),
        lines(
            "Unexplained operations by group",
            "Of the last look, by kind of group of the description. The finding off_plan names the field.",
            "short",
            Query(expr=f"ncclscope_unexplained_operations{{{JOB}}}", legend="{{job}} {{parallelism}}"),
            width=10,
        ),
        lines(
            "Bytes of an iteration by the description",
            "Elements x type that a rank should give to NCCL in an iteration, of the rank that has most.",
            "bytes",
            Query(expr=f"ncclscope_expected_bytes{{{JOB}}}", legend="{{op}} in {{parallelism}}"),
            is_stacked=True,
            width=10,
        ),
        number(
            "Step over expected",
            "Mean step over what it should take by description and calibration; of several jobs the slowest.",
            "percentunit",
            f'max({step} / ignoring (bound) ncclscope_expected_step_seconds{{{JOB}, bound="typical"}})',
            decimals=0,
        ),
        lines(
            "Step, observed and expected",
            "Mean step; dashed, what it should take: four of five jobs lie between low and high. The finding "
            "slower_than_plan is about steps far beyond.",
            "s",
            Query(expr=step, legend="{{job}} observed"),
            Query(expr=f"ncclscope_expected_step_seconds{{{JOB}}}", legend="{{job}} {{bound}}", is_dashed=True),
            width=10,
        ),
        lines(
            "Share of the GPUs' peak",
            "Operations of the model (MFU), and with what is computed again (HFU), over what the peak allows in the "
            "median iteration. GPU and description must be known.",
            "percentunit",
            Query(expr=f"ncclscope_model_flops_utilization_ratio{{{JOB}}}", legend="{{job}} MFU"),
            Query(expr=f"ncclscope_hardware_flops_utilization_ratio{{{JOB}}}", legend="{{job}} HFU", is_dashed=True),
            width=10,
        ),
    ]


def _slowest_table() -> dashboard.Panel:
    keys = "job, communicator, parallelism"
    return rows(
        "Groups",
        "One line for each communicator: its size and hosts, bandwidth and efficiency of its slowest large "
        "message, and its waiting. Its name leads to its own dashboard.",
        Query(expr=f"ncclscope_communicator_info{{{KIND}}}", is_instant=True),
        Query(expr=f"min by ({keys}) (ncclscope_busbw_bytes_per_second{{{KIND}, {LARGE}}})", is_instant=True),
        Query(
            expr=f'min by ({keys}) (ncclscope_efficiency_ratio{{{KIND}, reference="topology", {LARGE}}})',
            is_instant=True,
        ),
        Query(expr=f"ncclscope_wait_ratio{{{KIND}}}", is_instant=True),
        renamed={
            "communicator": "Communicator",
            "parallelism": "Parallelism",
            "size": "Ranks",
            "hosts": "Hosts",
            "Value #B": "Bus bandwidth",
            "Value #C": "Of the limit",
            "Value #D": "Waiting",
            "comm_id": "commId",
        },
        units={"Bus bandwidth": "Bps", "Of the limit": "percentunit", "Waiting": "percentunit"},
        hidden=["job", "identity", "Value #A"],
        links={
            "Communicator": "/d/ncclscope-communicator?var-communicator=${__value.raw}&${job:queryparam}"
            "&${__url_time_range}"
        },
        height=12,
    )


def _job_inspector() -> list[dashboard.Panel]:
    upper, lower = (rate(f"ncclscope_inspector_{name}_total", KIND) for name in ("kernel_seconds", "records"))
    keys = "parallelism, op, size_class"
    return [
        lines(
            "Inspector over kernels",
            "Bus bandwidth as NCCL Inspector prints it over that of the kernel, both with waiting: 1 is agreement.",
            "percentunit",
            Query(
                expr=f"quantile by ({keys}) (0.5, ncclscope_inspector_busbw_ratio{{{KIND}}})",
                legend="{{op}} {{size_class}} in {{parallelism}}",
            ),
        ),
        lines(
            "Kernel time by Inspector",
            "Mean time of a kernel as NCCL Inspector says.",
            "s",
            Query(
                expr=f"sum by ({keys}) ({upper}) / sum by ({keys}) ({lower})",
                legend="{{op}} {{size_class}} in {{parallelism}}",
            ),
        ),
    ]
