"""The plan of a job: what its description has it send, beside what it sent, as a document and as rows of a file."""

# pyright: reportUnknownParameterType=false
# (pyarrow carries no types)
from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Final

import pyarrow as pa

from ncclscope_models.description import Completed
from ncclscope_models.difference import Row
from ncclscope_models.emission.megatron import not_covered
from ncclscope_models.emission.rules import RULES, Basis, basis
from ncclscope_models.explanation import Explanation, explain, typical_iteration, typical_ranks
from ncclscope_models.job import Framework
from ncclscope_models.minimal_edit import Edit, minimal_edits
from ncclscope_service.export.tables import schema
from ncclscope_service.job.step_lines import StepLines

_ROWS_AT_ONCE: Final = 65_536


@dataclass(frozen=True, slots=True)
class Plan:
    """What a job should send and what it sent."""

    job: str
    described: Completed
    lines: StepLines
    explanation: Explanation
    edits: tuple[Edit, ...]
    """Changes of one field of the description after which nothing is unexplained."""

    @property
    def basis(self) -> Basis:
        """What the rules rest on."""
        job = self.described.job
        return basis(job.framework, job.version)

    @property
    def not_covered(self) -> tuple[str, ...]:
        """What the job does that no rule describes."""
        job = self.described.job
        return not_covered(job) if job.framework is Framework.MEGATRON else ()


def make_plan(job: str, described: Completed, lines: StepLines) -> Plan:
    """Holds a job's lines against its description.

    Raises:
        ModelError: the framework has no rules for the job's layout.
    """
    explanation = explain(described.job, lines.seen, lines.gaps)
    edits: list[Edit] = []
    if explanation.unexplained:
        sample = {rank: typical_iteration(lines.seen, rank) for rank in typical_ranks(explanation)}
        edits = minimal_edits(described, explanation.order, sample)
    return Plan(job, described, lines, explanation, tuple(edits))


def verdict(plan: Plan) -> str:
    """One sentence: whether the job sends what its description says, and if not, what would explain it."""
    explanation = plan.explanation
    if not explanation.differences:
        return "no whole iteration of a known rank is in the log: nothing to hold against the description"
    if not explanation.unexplained:
        return "every operation is explained"
    missing = f"{explanation.unexplained:,} operations are unexplained"
    if plan.edits:
        return f"{'; or '.join(map(edit_sentence, plan.edits))} (0 unexplained instead of {explanation.unexplained:,})"
    if plan.not_covered:
        return f"{missing}; no rules for {', '.join(plan.not_covered)}"
    return f"{missing}, and no single field of the description explains them"


def edit_sentence(edit: Edit) -> str:
    """For instance "the description says micro_batch 4, the traffic says 2"."""
    return f"the description says {edit.field} {_word(edit.before)}, the traffic says {_word(edit.after)}"


def _word(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def why(row: Row) -> str:
    """The reason of a row, as a table shows it."""
    rules = ", ".join(f"{name} {lines:,}" if len(row.rules) > 1 else name for name, lines in row.rules)
    parts = [rules] if rules else []
    if row.is_control:
        parts.insert(0, "control")
    if row.is_one_rank:
        parts.append("one rank: logged, moves nothing")
    if row.reason not in ("rule", "control"):
        parts.append(row.reason.upper() if row.is_unexplained else row.reason)
    return "; ".join(parts)


def plan_document(plan: Plan) -> dict[str, object]:
    """Content of `plan.json`, for one job."""
    described, explanation = plan.described, plan.explanation
    return {
        "job": plan.job,
        "verdict": verdict(plan),
        "rules": plan.basis.sentence,
        "may_raise": plan.basis.may_raise and not plan.not_covered,
        "not_covered": list(plan.not_covered),
        "not_nccl": [{"value": given.value, "source": given.source} for given in described.not_nccl],
        "fields": {
            name: {"value": given.value, "source": given.source} for name, given in described.fields.items()
        },
        "micro_batches": described.job.micro_batches,
        "rank_order": explanation.order,
        "iterations": explanation.iterations(),
        "rank_iterations": len(explanation.differences),
        "rank_iterations_with_lost_lines": sum(at in explanation.lossy for at in explanation.differences),
        "rank_iterations_skipped": sum(each.step.is_skipped for each in explanation.differences.values()),
        "unexplained_operations": explanation.unexplained,
        "unexplained_bytes": explanation.unexplained_bytes,
        "edits": [
            {"field": edit.field, "described": edit.before, "observed": edit.after, "sentence": edit_sentence(edit)}
            for edit in plan.edits
        ],
        "classes": [
            {
                "ranks": each.ranks,
                "iterations": each.iterations,
                "lines": [_line(row) for row in each.rows],
            }
            for each in explanation.classes()
        ],
    }  # fmt: skip


def _line(row: Row) -> dict[str, object]:
    return {
        "groups": list(row.groups),
        "comm_size": row.ranks,
        "op": row.op,
        "dtype": row.dtype,
        "count": row.elements,
        "expected": row.expected,
        "observed": row.observed,
        "logged_bytes": row.logged_bytes,
        "message_bytes": row.message_bytes,
        "wire_bytes": round(row.wire_bytes),
        "reason": row.reason,
        "rules": {name: {"operations": lines, "source": RULES[name].source} for name, lines in row.rules},
        "is_control": row.is_control,
    }


def expected_tables(plans: Mapping[str, Plan]) -> Iterator[pa.Table]:
    """Rows of `expected.parquet`, a bounded number at a time: every line of every rank and whole iteration."""
    records: list[dict[str, object]] = []
    for plan in plans.values():
        for (rank, iteration), difference in plan.explanation.differences.items():
            for row in difference.rows:
                comm_ids = dict.fromkeys(plan.lines.comm_ids.get(name, name) for name in row.communicators)
                records.append(
                    {
                        "job": plan.job,
                        "comm_id": " ".join(comm_ids) or None,
                        "parallelism": " ".join(row.groups) or None,
                        "comm_size": row.ranks,
                        "rank": rank,
                        "iteration": iteration,
                        "op": row.op,
                        "dtype": row.dtype.lower(),
                        "count": row.elements,
                        "expected": row.expected,
                        "observed": row.observed,
                        "logged_bytes": row.logged_bytes,
                        "message_bytes": row.message_bytes,
                        "wire_bytes": round(row.wire_bytes),
                        "reason": row.reason,
                        "rules": ", ".join(name for name, _ in row.rules) or None,
                        "is_control": row.is_control,
                    }
                )
            if len(records) >= _ROWS_AT_ONCE:
                yield pa.Table.from_pylist(records, schema=schema.EXPECTED)
                records = []
    if records:
        yield pa.Table.from_pylist(records, schema=schema.EXPECTED)
