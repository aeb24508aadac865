"""The exception tree, by what its reader can do about it.

    NcclscopeError
    ├── ConfigError      fix the setting it names; the program does not start
    ├── ProtocolError    this session is closed; other sessions go on
    │   └── DamagedError     the network changed bytes on their way: the connection is closed, and all is sent again
    ├── SourceError      this file cannot be read now; it is tried again or skipped, and counted
    ├── FormatError      this record is skipped and counted
    └── StateError       this snapshot cannot be made or is of no use; the program starts without it
        └── OtherVersionError   another version of the program wrote it

Anything else that is raised is a bug: please report it.
"""

from __future__ import annotations


class NcclscopeError(Exception):
    """The base of every error that ncclscope raises on purpose."""


class ConfigError(NcclscopeError):
    """A setting is wrong: names the setting, its value and what is allowed."""


class ProtocolError(NcclscopeError):
    """The peer sent something that the protocol does not allow; this session cannot go on."""


class DamagedError(ProtocolError):
    """A message is not what its peer sent: its checksum does not fit, or is missing."""


class SourceError(NcclscopeError):
    """A file cannot be read (now): says which, why, and what to do.

    `reason` is a short fixed word ("empty", "locked", "not_sqlite", ...) under which it is counted.
    """

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason


class StateError(NcclscopeError):
    """The state of a machine cannot be kept, or a snapshot of it cannot be restored: says why."""


class OtherVersionError(StateError):
    """The snapshot is whole, and of another version of the program."""


class FormatError(NcclscopeError):
    """One record does not have the form that its kind demands."""
