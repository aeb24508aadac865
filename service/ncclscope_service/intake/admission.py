"""Admission of an agent, and its owner: its token or certificate against the list, its host and job against both.

An agent is known by its id, which others may guess. So the id is kept apart by owner: who comes under another name
is another agent, whatever id it claims, and cannot take over connections, sessions or positions.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final, TypeVar

from ncclscope_service.auth.access import AccessList, Grant
from ncclscope_service.intake.agents import AgentError, Strings
from ncclscope_wire.batch import Batch
from ncclscope_wire.messages import Hello

_Record = TypeVar("_Record")

FOREIGN_HOST: Final = "foreign-host"
"""Replaces a host name that an agent may not speak of."""
_ANYBODY: Final = Grant()


@dataclass(frozen=True, slots=True)
class Admission:
    """The rules of the agents' port as they are now."""

    access: AccessList | None = None
    """None if no token is required."""

    def admit(self, hello: Hello, token_digest: bytes | None, certificate: tuple[str, ...]) -> Grant:
        """The jobs and hosts that this agent may speak of; `token_digest` is that of its token, None if it has none.

        Raises:
            AgentError: "unauthorized", "foreign_job" or "foreign_host".
        """
        grant = self.admit_host(hello.host, token_digest, certificate)
        if not grant.allows_job(hello.job):
            raise AgentError("foreign_job", f"this token is not for the job {hello.job!r}")
        return grant

    def admit_host(self, host: str, token_digest: bytes | None, certificate: tuple[str, ...]) -> Grant:
        """As `admit`, of somebody of whom only the host is known.

        Raises:
            AgentError: "unauthorized" or "foreign_host".
        """
        grant = self._grant(token_digest, certificate)
        if not grant.allows_host(host):
            raise AgentError("foreign_host", f"this token is not for the host {host!r}")
        return grant

    def _grant(self, token_digest: bytes | None, certificate: tuple[str, ...]) -> Grant:
        if self.access is None:
            return Grant(name=certificate[0]) if certificate else _ANYBODY
        found = None if token_digest is None else self.access.grant_for_digest(token_digest)
        found = found or self.access.grant_for_certificate(certificate)
        if found is None:
            said = "this token is not known" if token_digest else "a token is needed: give the agent --token-file FILE"
            raise AgentError("unauthorized", said)
        return found


def owned_id(agent_id: str, grant: Grant) -> str:
    """The id under which the service knows an agent."""
    return "/".join(filter(None, (grant.name, agent_id.replace("/", ":"))))


def owner_of(owned: str) -> str:
    """The owner in what `owned_id` gives; names of owners have no slash."""
    owner, slash, _ = owned.partition("/")
    return owner if slash else ""


class HostWatch:
    """Takes what a session must not say of foreign hosts out of its batches; a torn line may name one by accident."""

    def __init__(self, grant: Grant, strings: Strings) -> None:
        """`strings`: all that the session's batches have brought before; those that are allowed are added."""
        self._grant = grant
        self._strings = strings

    def allowed(self, batch: Batch) -> Batch:
        """The batch without records of foreign hosts, whose names are put out; counted as skipped "foreign_host".

        Raises:
            AgentError: a host is a string of an earlier batch, and not allowed.
        """
        known = self._strings.of(batch.source.key)
        first = len(known)
        named = _indices(batch)
        foreign = {index for index in named if first <= index and not self._may(_at(batch.strings, index - first))}
        strings = tuple(FOREIGN_HOST if first + at in foreign else text for at, text in enumerate(batch.strings))
        if any(not self._may(_at(known, index)) for index in named if index < first):
            raise AgentError("foreign_host", "a batch names a host that its token is not for", forgets_session=True)
        batch = replace(batch, strings=strings)
        self._strings.add(batch)
        return self._without_records(batch, len(foreign))

    def _may(self, host: str) -> bool:
        return host == FOREIGN_HOST or self._grant.allows_host(host)

    def _without_records(self, batch: Batch, refused: int) -> Batch:
        def kept(records: tuple[_Record, ...]) -> tuple[_Record, ...]:
            nonlocal refused
            allowed = tuple(record for record in records if self._may_record(record))
            refused += len(records) - len(allowed)
            return allowed

        batch = replace(
            batch,
            communicators=kept(batch.communicators),
            versions=kept(batch.versions),
            captures=kept(batch.captures),
            facts=kept(batch.facts),
            topologies=kept(batch.topologies),
            tuning_tables=kept(batch.tuning_tables),
        )
        if not refused:
            return batch
        skipped = {**batch.counts.skipped, "foreign_host": batch.counts.skipped.get("foreign_host", 0) + refused}
        return replace(batch, counts=replace(batch.counts, skipped=skipped))

    def _may_record(self, record: object) -> bool:
        host: object = getattr(record, "host", None)
        return not isinstance(host, str) or self._may(host)


def _indices(batch: Batch) -> set[int]:
    """Indices of the strings that a batch uses as hosts."""
    named: set[int] = set()
    for rows in (
        batch.threads,
        batch.kernel_templates,
        batch.range_templates,
        batch.inspected_ranks,
        batch.busy,
    ):
        named.update(rows["host"].tolist())
    return named


def _at(strings: Sequence[str], index: int) -> str:
    return strings[index] if index < len(strings) else ""
