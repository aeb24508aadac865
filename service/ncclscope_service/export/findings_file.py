"""`findings.json`: what a person must know, oldest first."""

from __future__ import annotations

from ncclscope_service.export.selection import Selection
from ncclscope_service.rows import Finding


def findings_document(selection: Selection) -> list[dict[str, object]]:
    """The content of the file: one object per finding, by the time since when."""
    return [finding_record(finding) for finding in sorted(selection.findings, key=lambda finding: finding.since_ns)]


def finding_record(finding: Finding) -> dict[str, object]:
    """One finding as JSON has it."""
    return {
        "kind": finding.kind.value,
        "severity": finding.severity.value,
        "job": finding.job,
        "comm_id": finding.comm_id,
        "parallelism": finding.parallelism,
        "ranks": list(finding.ranks),
        "hosts": list(finding.hosts),
        "since_ns": finding.since_ns,
        "until_ns": finding.until_ns,
        "confidence": finding.confidence,
        "summary": finding.summary,
        "evidence": finding.evidence,
    }
