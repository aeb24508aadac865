# ruff: noqa: E501  a pattern is as long as the line that it reads
"""Lines of NCCL's RAS watcher (2.24 on), which keeps in touch with all processes of a job and says who is dead.

*Source:* NCCL `src/ras/*.cc`.
"""

from __future__ import annotations

from typing import Final

from ncclscope_agent.sources.log_family import Family, Fields, form, numbers
from ncclscope_wire import facts

_HEX: Final = r"0x[0-9a-f]{1,16}"
_ADDRESS: Final = r"[\w.:%-]{1,100}<\d{1,5}>"


def _ras_peer(fields: Fields) -> Fields:
    fields["gpus"] = numbers(str(fields.pop("gpu_names")))
    return fields


FAMILIES: Final[tuple[Family, ...]] = (
    form("ras", facts.RasEvent, "RAS thread", r"RAS (?P<event>thread started|thread terminating)", is_closed=True),
    form("ras", facts.RasEvent, "RAS handling", r"RAS (?P<event>handling local termination request)", is_closed=True),
    form(
        "ras",
        facts.RasEvent,
        "RAS ",
        rf"RAS (?P<event>client listening socket|network listening socket) at (?P<address>{_ADDRESS})",
        is_closed=True,
    ),
    form(
        "ras",
        facts.RasEvent,
        "RAS handling",
        r"RAS (?P<event>handling local addRanks request) \(old nRasPeers (?P<peers>\d+)\)",
        is_closed=True,
    ),
    form(
        "ras",
        facts.RasEvent,
        "RAS finished",
        r"RAS (?P<event>finished local processing of addRanks request) \(new nRasPeers (?P<peers>\d+), nRankPeers (?P<ranks>\d+)\)",
        is_closed=True,
    ),
    form(
        "ras",
        facts.RasEvent,
        "RAS peer ",
        rf"RAS (?P<event>peer) (?P<peer>\d+): socket (?P<address>{_ADDRESS}), pid (?P<peer_pid>\d+), GPUs? (?P<gpu_names>\d+(?:,\d+)*)"
        r"(?P<is_self_is> \[this process\])?",
        finish=_ras_peer,
    ),
    form(
        "ras",
        facts.RasEvent,
        "RAS peersHash",
        rf"RAS (?P<event>peersHash) (?P<hash_hex>{_HEX})",
    ),
    form(
        "ras",
        facts.RasEvent,
        "RAS link",
        rf"RAS link (?P<peer>-?\d+): (?P<event>opening new (?:primary|fallback) connection|calculated deferred (?:primary|fallback) connection)"
        rf" with (?P<address>{_ADDRESS})",
        is_closed=True,
    ),
    form(
        "ras",
        facts.RasEvent,
        "RAS new",
        rf"RAS (?P<event>new incoming socket connection) from (?P<address>{_ADDRESS})",
        is_closed=True,
    ),
    form(
        "ras",
        facts.RasEvent,
        "RAS handling",
        rf"RAS (?P<event>handling connInit) from (?P<address>{_ADDRESS}) \(version (?P<version>\d+), listeningAddr {_ADDRESS},"
        rf" peersHash (?P<hash_hex>{_HEX}), deadPeersHash (?P<dead_hash_hex>{_HEX})\)",
        is_closed=True,
    ),
    form(
        "ras",
        facts.RasEvent,
        "RAS handling",
        rf"RAS (?P<event>handling connInitAck) from (?P<address>{_ADDRESS}) \(nack (?P<number>\d+)\)",
        is_closed=True,
    ),
    form(
        "ras",
        facts.RasEvent,
        "RAS established",
        rf"RAS (?P<event>established connection) with (?P<address>{_ADDRESS}) \(sendQ (?:not )?empty, experiencingDelays (?P<number>\d),"
        r" startRetryTime (?P<seconds>\d+\.\d+)s\)",
        is_closed=True,
    ),
    form(
        "ras",
        facts.RasEvent,
        "RAS current",
        rf"RAS current socket connection with (?P<address>{_ADDRESS}) (?P<event>closed by peer on (?:receive|send)); terminating it",
        is_closed=True,
    ),
    form(
        "ras",
        facts.RasEvent,
        "RAS terminating",
        rf"RAS (?P<event>terminating a connection) with (?P<address>{_ADDRESS})",
        is_closed=True,
    ),
    form(
        "ras_dead",
        facts.RasEvent,
        "RAS declaring",
        rf"RAS declaring peer (?P<address>{_ADDRESS}) as (?P<event>DEAD); rasDeadPeersHash (?P<dead_hash_hex>{_HEX})",
    ),
    form(
        "ras_timeout",
        facts.RasEvent,
        "RAS ",
        r"RAS (?P<event>[a-z-]{1,20}(?: [a-z-]{1,20}){0,3}? timeout(?: warning| error)?) \((?P<seconds>[\d.e+]{1,20})s\)"
        rf" on socket connection with (?P<address>{_ADDRESS})",
        is_closed=True,
    ),
    form(
        "ras_timeout",
        facts.RasEvent,
        "RAS trying",
        rf"RAS (?P<event>trying to reconnect) with (?P<address>{_ADDRESS}) \(experiencingDelays (?P<number>\d),"
        r" startRetryTime (?P<seconds>\d+\.\d+)s\)",
        is_closed=True,
    ),
)
