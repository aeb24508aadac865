"""The plan of a job: its description held against its lines, as a record of what was expected, observed, and why."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from ncclscope_models.description import Completed, Given
from ncclscope_models.difference import Row
from ncclscope_models.emission.megatron import not_covered
from ncclscope_models.emission.rules import RULES, Basis, basis
from ncclscope_models.explanation import Explanation, explain, typical_iteration, typical_ranks
from ncclscope_models.job import Framework, Job
from ncclscope_models.minimal_edit import Edit, minimal_edits
from ncclscope_service.job.step_lines import StepLines
from ncclscope_service.store.plan_records import PlanClass, PlanEdit, PlanField, PlanLine, PlanRecord, PlanRule


@dataclass(frozen=True, slots=True)
class Plan:
    """Operations that a job should send, beside those that it sent."""

    job: str
    described: Completed
    lines: StepLines
    explanation: Explanation
    edits: tuple[Edit, ...] | None
    """Changes of one field of the description after which nothing is unexplained; None: not looked for."""

    @property
    def basis(self) -> Basis:
        """Basis of the rules."""
        job = self.described.job
        return basis(job.framework, job.version)

    @property
    def not_covered(self) -> tuple[str, ...]:
        """Features of the job that no rule describes."""
        job = self.described.job
        return not_covered(job) if job.framework is Framework.MEGATRON else ()


def make_plan(job: str, described: Completed, lines: StepLines) -> Plan:
    """Holds a job's lines against its description.

    Raises:
        ModelError: the framework has no rules for the job's layout.
    """
    plan = Plan(job, described, lines, explain(described.job, lines.seen, lines.gaps), None)
    return replace(plan, edits=edits_of(plan) if plan.explanation.unexplained else ())


def edits_of(plan: Plan) -> tuple[Edit, ...]:
    """Changes of one field that explain what is unexplained: half a second of work."""
    explanation = plan.explanation
    sample = {rank: typical_iteration(plan.lines.seen, rank) for rank in typical_ranks(explanation)}
    return tuple(minimal_edits(plan.described, explanation.order, sample))


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
    if plan.edits is None:
        return missing
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


def plan_record(plan: Plan) -> PlanRecord:
    """The plan as it is kept and shown: content of `plan.json`, for one job."""
    described, explanation, job = plan.described, plan.explanation, plan.described.job
    return PlanRecord(
        job=plan.job,
        model=_model(job),
        verdict=verdict(plan),
        rules=plan.basis.sentence,
        may_raise=may_raise(described),
        not_covered=plan.not_covered,
        not_nccl=_fields(described.not_nccl),
        fields=dict(zip(described.fields, _fields(tuple(described.fields.values())), strict=True)),
        micro_batches=job.micro_batches,
        batch=f"{job.training.global_batch} / ({job.layout.data} x {job.training.micro_batch})",
        rank_order=explanation.order,
        iterations=tuple(explanation.iterations()),
        rank_iterations=len(explanation.differences),
        rank_iterations_with_lost_lines=sum(at in explanation.lossy for at in explanation.differences),
        rank_iterations_skipped=sum(each.step.is_skipped for each in explanation.differences.values()),
        unexplained_operations=explanation.unexplained,
        unexplained_bytes=explanation.unexplained_bytes,
        edits=tuple(
            PlanEdit(field=edit.field, described=edit.before, observed=edit.after, sentence=edit_sentence(edit))
            for edit in plan.edits or ()
        ),
        classes=tuple(
            PlanClass(
                ranks=tuple(each.ranks),
                iterations=tuple(each.iterations),
                rank_iterations=len(each.places),
                lines=tuple(map(_line, each.rows)),
            )
            for each in explanation.classes()
        ),
    )


def may_raise(described: Completed) -> bool:
    """Whether a difference may be a finding: rules of a known version, that cover all that the job does."""
    job = described.job
    is_covered = job.framework is not Framework.MEGATRON or not not_covered(job)
    return basis(job.framework, job.version).may_raise and is_covered


def _fields(given: Sequence[Given]) -> tuple[PlanField, ...]:
    return tuple(PlanField(value=each.value, source=each.source) for each in given)


def _line(row: Row) -> PlanLine:
    return PlanLine(
        groups=tuple(map(str, row.groups)),
        comm_size=row.ranks,
        op=row.op,
        dtype=row.dtype,
        count=row.elements,
        expected=row.expected,
        observed=row.observed,
        expected_bytes=row.expected_bytes,
        logged_bytes=row.logged_bytes,
        message_bytes=row.message_bytes,
        wire_bytes=round(row.wire_bytes),
        reason=str(row.reason),
        rules={name: PlanRule(operations=lines, source=RULES[name].source) for name, lines in row.rules},
        is_control=row.is_control,
        why=why(row),
    )


def _model(job: Job) -> str:
    shape, layout = job.shape, job.layout
    degrees = [f"t {layout.tensor}", f"p {layout.pipeline}", f"d {layout.data}"]
    degrees += [f"{name} {degree}" for name, degree in (("c", layout.context), ("e", layout.expert)) if degree > 1]
    degrees += [f"{layout.chunks} chunks"] if layout.chunks > 1 else []
    parts = [
        f"{shape.layers} layers", f"hidden {shape.hidden}", f"heads {shape.heads}", f"sequence {shape.sequence}",
        f"vocabulary {shape.vocabulary:,}", *degrees, f"SP {'on' if layout.is_sequence_parallel else 'off'}",
        job.training.precision, f"{job.framework} {job.version}".strip(),
    ]  # fmt: skip
    return ", ".join(parts)
