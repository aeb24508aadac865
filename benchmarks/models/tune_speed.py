"""How long `tune` takes for 100,000 layouts on one core."""

from __future__ import annotations

from time import process_time

from ncclscope_models.fitted_machine import FittedMachine, Links
from ncclscope_models.job import Job, Layout, Precision, Recompute, Training, gpt
from ncclscope_models.layout_space import Space, layouts
from ncclscope_models.machine import Machine
from ncclscope_models.memory import GIB, MemoryNeed
from ncclscope_models.ranking import rank

_GPUS = 3072


def main() -> None:
    """Prints the table."""
    now = Job(
        shape=gpt(layers=96, hidden=12_288, heads=96, sequence=2048, vocabulary=98_304),
        layout=Layout(tensor=8, pipeline=16, data=24, is_sequence_parallel=True),
        training=Training(micro_batch=1, global_batch=645_120, precision=Precision.BF16, are_gradients_fp32=True),
    )
    links = Links(latency=6e-6, bandwidth=235e9, width=0.06, measured=1000)
    machine = Machine(
        gpus_per_node=8,
        peak_flops=312e12,
        best_share=0.75,
        inside_bandwidth=links.bandwidth,
        node_bandwidth=100e9,
        inside_latency=links.latency,
        network_latency=15e-6,
        memory_bandwidth=2e12,
    )
    fitted = FittedMachine(machine=machine, factor=1.0, inside=links, between=links, is_from_parts=True)
    space = Space(gpus=_GPUS, gpus_per_node=8, most_tensor=64, recomputes=tuple(Recompute))
    print("\nA GPT of 175 B on 3,072 GPUs\n")
    print("| memory of a GPU | layouts | do not fit | CPU s | s per 100,000 |\n|---|---|---|---|---|")
    for name, limit in (("80 GiB", 80 * GIB), ("not known", None)):
        begin = process_time()
        found = rank(layouts(now, space), now, fitted, MemoryNeed(limit))
        took = process_time() - begin
        each = took / found.considered * 1e5
        print(f"| {name} | {found.considered:,} | {found.do_not_fit:,} | {took:.1f} | {each:.1f} |")
