"""Whose data a journal holds whole, for a build that cannot read the state before it.

After an upgrade the state may be of no use, and the journal goes back to some moment only. Of an agent that was new to
the service after that moment it has everything, which can be applied again. All others read their files again from the
beginning. What an agent gave must come either from the journal or from the agent, or it would count twice; and the
ranks of a job must come from one of both, or those that are still to come would be taken for missing: the agents of a
job stand or fall together.
"""

from __future__ import annotations

from ncclscope_service.agents import KnownAgent
from ncclscope_service.journal_entry import BatchTaken, Entry, HelloSaid, Ticked, Told
from ncclscope_service.receive import Receiver, ReplayError
from ncclscope_wire.codec import decode_message
from ncclscope_wire.errors import ProtocolError, StateError
from ncclscope_wire.messages import Hello


class WholeAgents:
    """Goes through a journal: `feed` it every entry, in order; then `takes` says which of them may be applied."""

    def __init__(self) -> None:
        self._agents: dict[str, KnownAgent] = {}
        self._receiver = Receiver(agents=self._agents)
        self._begins: dict[str, int] = {}
        """Number of the entry with which an agent was new, by agent."""
        self._jobs: dict[str, str] = {}
        self._broken: set[str] = set()

    def feed(self, number: int, entry: Entry) -> None:
        """The next entry, and its number.

        Raises:
            StateError: another version wrote it, and whom it is of cannot be told.
        """
        if isinstance(entry, Ticked | Told):
            return
        agent = _agent_of(entry)
        if isinstance(entry, HelloSaid):
            self._jobs[agent] = _hello_of(entry).job
            if entry.is_new:
                self._agents.pop(agent, None)
                self._begins[agent] = number
                self._broken.discard(agent)
        elif isinstance(entry, BatchTaken):
            self._jobs.setdefault(agent, entry.job)
        if agent not in self._begins:
            self._broken.add(agent)
            return
        try:
            self._receiver.replay(entry)
        except (ReplayError, ProtocolError):
            self._broken.add(agent)

    def agents(self) -> frozenset[str]:
        """Those that are whole, of jobs all of whose agents are; all others are to read their files again."""
        broken_jobs = {self._jobs.get(agent, "") for agent in self._broken}
        if "" in broken_jobs:
            return frozenset()  # of one of them the job is not known: it may be any
        return frozenset(agent for agent in self._begins if self._jobs[agent] not in broken_jobs)

    def takes(self, agents: frozenset[str], number: int, entry: Entry) -> bool:
        """Whether an entry may be applied where there is no state, for these agents.

        What receivers of notifications were told is left out: there are none while entries are applied so.
        """
        if isinstance(entry, Ticked | Told):
            return isinstance(entry, Ticked)
        agent = _agent_of(entry)
        return agent in agents and number >= self._begins[agent]


def _agent_of(entry: Entry) -> str:
    if isinstance(entry, HelloSaid):
        return _hello_of(entry).agent_id
    assert not isinstance(entry, Ticked | Told), "the entry is of no agent"
    return entry.agent


def _hello_of(entry: HelloSaid) -> Hello:
    try:
        hello = decode_message(entry.payload)
    except ProtocolError as error:
        raise StateError(f"the journal holds a Hello that this program cannot read: {error}") from error
    if not isinstance(hello, Hello):
        raise StateError("the journal holds a Hello of another protocol version")
    return hello
