"""Facts about a node, for `check`: NCCL's version and variables, logs, clock, nsys, and the service.

Everything here acts: reads files, starts short commands, connects. Whatever is not there or does not answer is an
answer too ("not known"), never an exception.
"""

from __future__ import annotations

import importlib.metadata
import os
import re
import shutil
import socket
import stat
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from importlib.util import find_spec
from pathlib import Path
from typing import Final

from ncclscope import __version__
from ncclscope_agent.credentials import Credentials, closed_unheard, tls_sentence
from ncclscope_agent.files.paths import PathPatterns
from ncclscope_agent.files.recognise import ENOUGH_BYTES, FileKind, recognise
from ncclscope_agent.health import read_kernel_clock
from ncclscope_agent.nccl_settings.advice import NcclVersion, read_version, version_of_code
from ncclscope_agent.nccl_settings.volume import LogLook, Rate, look_at
from ncclscope_agent.node.ras_port import RasError, ask
from ncclscope_agent.sources.nsys.export import describe_export
from ncclscope_agent.sources.ras import read_answer
from ncclscope_wire.codec import decode_message, encode_message
from ncclscope_wire.errors import FormatError, ProtocolError, SourceError
from ncclscope_wire.frame import Deframer, encode_frame
from ncclscope_wire.messages import ASKING_VERSION, PROTOCOL_VERSION, WOULD_LET_IN, Hello, Refused

_BEGINNING_BYTES: Final = 1 << 20
_LAST_BYTES: Final = 2 << 20
"""Some 9,000 lines: seconds to minutes of a training run, and 50 ms to look at."""
_COMMAND_SECONDS: Final = 20.0
_SERVICE_SECONDS: Final = 5.0
_RAS_SECONDS: Final = 5.0
_WHEELS: Final = ("nvidia-nccl-cu13", "nvidia-nccl-cu12", "nvidia-nccl-cu11")
_ASK_LIBRARY: Final = (
    "import ctypes; n = ctypes.c_int(); r = ctypes.CDLL('libnccl.so.2').ncclGetVersion(ctypes.byref(n)); "
    "print(n.value if r == 0 else '')"
)
_EXPORTS_OPENED: Final = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class FoundVersion:
    """NCCL's version, and where it was found."""

    version: NcclVersion
    told_by: str


def nccl_on_this_node() -> FoundVersion | None:
    """The NCCL of this Python's environment, else the library that the loader finds; None if there is none."""
    for wheel in _WHEELS:
        try:
            found = read_version(importlib.metadata.version(wheel))
        except importlib.metadata.PackageNotFoundError:
            continue
        if found is not None:
            return FoundVersion(version=found, told_by=f"package {wheel}")
    # In a process of its own: a foreign library may do anything when it is loaded.
    printed = printed_by([sys.executable, "-c", _ASK_LIBRARY])
    if printed is not None and printed.strip().isdigit():
        return FoundVersion(version=version_of_code(int(printed)), told_by="libnccl.so.2")
    return None


def printed_by(command: Sequence[str]) -> str | None:
    """The output of a command; None if it cannot be run, fails, or takes too long."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_COMMAND_SECONDS, check=False)
    except (OSError, subprocess.SubprocessError, UnicodeDecodeError):
        return None
    return done.stdout if done.returncode == 0 else None


def nccl_variables(environment: Mapping[str, str]) -> dict[str, str]:
    """The variables of NCCL as it will see them: the environment, then its two configuration files.

    *Source:* NCCL `src/misc/param.cc:initEnv`, `setEnvFile`: what is set already stays.
    """
    variables = {name: value for name, value in environment.items() if name.startswith("NCCL_")}
    own = environment.get("NCCL_CONF_FILE") or os.path.expanduser("~/.nccl.conf")
    for path in (own, "/etc/nccl.conf"):
        for name, value in _settings_in(Path(path)):
            if name.startswith("NCCL_"):
                variables.setdefault(name, value)
    return variables


def _settings_in(path: Path) -> list[tuple[str, str]]:
    try:
        lines = path.read_text(errors="replace").split("\n")
    except OSError:
        return []
    pairs = [line.partition("=") for line in lines if not line.startswith("#") and "=" in line]
    return [(name, value) for name, _, value in pairs]


def directory_state(pattern: str) -> str | None:
    """The fault of the directory of a log file pattern: "missing" or "not_writable"; None if it has none."""
    directory = Path(pattern).parent
    if "%" in str(directory) or not directory.is_absolute():
        return None
    if not directory.is_dir():
        return "missing"
    return None if os.access(directory, os.W_OK | os.X_OK) else "not_writable"


def look_at_logs(patterns: Sequence[str], *, observe_seconds: float) -> list[tuple[LogLook, Rate | None]]:
    """Every readable log that matches, and how fast it grows, if that is known."""
    paths = [path for path in PathPatterns(patterns).paths() if path.is_file()]
    before = {path: _size(path) for path in paths}
    began = time.monotonic()
    if observe_seconds > 0 and paths:
        time.sleep(observe_seconds)
    seconds = time.monotonic() - began if observe_seconds > 0 else 0.0
    found: list[tuple[LogLook, Rate | None]] = []
    for path in paths:
        size, was = _size(path), before[path]
        look = _look(path)
        if look is not None and size is not None and was is not None:
            rate = look.rate_by_growth(size - was, seconds) if seconds else look.rate_by_stamps()
            found.append((look, rate))
    return found


def unreadable_logs(patterns: Sequence[str]) -> list[Path]:
    """Logs that match and that this user may not read."""
    return [path for path in PathPatterns(patterns).paths() if path.is_file() and not os.access(path, os.R_OK)]


def _size(path: Path) -> int | None:
    try:
        return path.stat().st_size
    except OSError:
        return None


def _look(path: Path) -> LogLook | None:
    try:
        with path.open("rb") as stream:
            size = os.fstat(stream.fileno()).st_size
            beginning = stream.read(_BEGINNING_BYTES)
            at = max(0, size - _LAST_BYTES)
            stream.seek(at)
            last = stream.read(_LAST_BYTES)
    except OSError:
        return None
    return look_at(str(path), size_bytes=size, beginning=beginning, last_part=last, last_part_at=at)


def free_bytes(path: Path) -> int | None:
    """Free space of the disk on which a path lies, for those who are not root."""
    try:
        status = os.statvfs(path)
    except OSError:
        return None
    return status.f_bavail * status.f_frsize


@dataclass(frozen=True, slots=True, kw_only=True)
class ClockState:
    """State of this node's clock, as far as it is known."""

    synchronised: bool | None
    """None: not known."""
    error_seconds: float | None
    """As `told_by` estimates it."""
    told_by: str


def clock_state() -> ClockState:
    """From chrony if it answers, else from the kernel, which NTP and PTP daemons inform; neither needs root."""
    printed = printed_by(["chronyc", "-n", "tracking"]) if shutil.which("chronyc") else None
    return (read_chrony(printed) if printed else None) or kernel_clock_state()


def read_chrony(printed: str) -> ClockState | None:
    """The clock state that `chronyc -n tracking` printed; None if the text is something else. *Source:* chronyc(1)."""
    fields = {name.strip(): value.strip() for name, _, value in (line.partition(":") for line in printed.splitlines())}
    offset = re.match(r"(\d{1,18}(?:\.\d{1,18})?) seconds", fields.get("System time", ""))
    if offset is None or "Leap status" not in fields:
        return None
    return ClockState(
        synchronised=fields["Leap status"] != "Not synchronised",
        error_seconds=float(offset[1]),
        told_by="chronyc",
    )


def kernel_clock_state() -> ClockState:
    """The clock state that the kernel reports, with its estimated error."""
    known = read_kernel_clock()
    if known is None:
        return ClockState(synchronised=None, error_seconds=None, told_by="nobody")
    error = known.estimated_error_ns / 1e9 if known.is_synchronised else None
    return ClockState(synchronised=known.is_synchronised, error_seconds=error, told_by="the kernel")


def nsys_version(command: str = "nsys") -> str | None:
    """The last line that `nsys --version` prints; None if there is no nsys."""
    if shutil.which(command) is None:
        return None
    printed = printed_by([command, "--version"])
    return printed.strip().splitlines()[-1] if printed and printed.strip() else "of unknown version"


def count_files(patterns: Sequence[str], kind: FileKind) -> int:
    """How many readable files that match are of this kind."""
    names, found = PathPatterns(patterns), 0
    for path in names.paths():
        with suppress(OSError):
            handle, _ = names.open(path)
            try:
                if stat.S_ISREG(os.fstat(handle).st_mode):
                    found += recognise(os.pread(handle, ENOUGH_BYTES, 0), path.name) is kind
            finally:
                os.close(handle)
    return found


def ras_state(host: str, port: int) -> str:
    """Whether NCCL's RAS answers here: "answered", or why not (`RasError`)."""
    try:
        answer = ask(host, port, as_json=False, seconds=_RAS_SECONDS)
        read_answer(answer or b"")
    except RasError as error:
        return error.reason
    except FormatError:
        return "unexpected"
    return "answered"


def rdma_ports(root: Path = Path("/sys/class/infiniband")) -> int:
    """Ports of RDMA NICs in sysfs."""
    return sum(1 for _ in root.glob("*/ports/*"))


def has_nvml() -> bool:
    """Whether the library that reads GPUs is installed."""
    return find_spec("pynvml") is not None


def graph_launches(directory: Path) -> int:
    """Launches of CUDA graphs that the newest exports in a directory hold as a whole, without their kernels."""
    exports = sorted(directory.glob("*.sqlite"), key=lambda path: (path.stat().st_mtime_ns, path))[-_EXPORTS_OPENED:]
    launches = 0
    for export in exports:
        with suppress(SourceError):
            launches += describe_export(export).graph_launches
    return launches


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceAnswer:
    """The outcome of asking the service."""

    answered: bool
    protocol_version: int | None
    seconds: float | None
    """From connecting to the answer."""
    text: str
    refused: str | None = None
    """Why an agent with these credentials would not be let in; None if it would be, or the service does not say."""
    lets_in: bool = False
    """The service says that such an agent would be let in."""


def ask_service(host: str, port: int, credentials: Credentials | None = None) -> ServiceAnswer:
    """Connects as an agent would, with TLS if `credentials` say so; says a Hello of no version and reads the answer.

    The service refuses that Hello, names its version, and says whether the token or certificate would do; it counts
    one refused connection, and learns of no agent.

    Raises:
        ConfigError: a file of the credentials cannot be used.
    """
    began = time.monotonic()
    credentials = credentials or Credentials()
    context, name = credentials.context(), credentials.server_name or host
    try:
        with ExitStack() as open_connections:
            connection = socket.create_connection((host, port), timeout=_SERVICE_SECONDS)
            open_connections.enter_context(connection)
            if context is not None:
                connection = open_connections.enter_context(context.wrap_socket(connection, server_hostname=name))
            connection.sendall(encode_frame(encode_message(_hello(credentials.token()))))
            answer = _first_message(connection)
    except TimeoutError:
        return _no_answer(
            f"does not answer within {_SERVICE_SECONDS:g} s: is it the port for agents, and not the page's?"
        )
    except OSError as error:
        if (sentence := tls_sentence(error)) is not None:
            return _no_answer(sentence)
        why = error.strerror or error
        return _no_answer(
            f"cannot be reached: {why}: does `ncclscope serve --listen` run there, and does the network let through?"
        )
    except ProtocolError as error:
        return _no_answer(f"something else than ncclscope's port for agents is there: {error}")
    if not isinstance(answer, Refused):
        hint = closed_unheard(credentials)
        return _no_answer(f"closed the connection without a word{hint}" if answer is None else "gave another answer")
    told = re.search(r"this service version (\d+)", answer.message)
    return ServiceAnswer(
        answered=True,
        protocol_version=int(told[1]) if told else None,
        seconds=time.monotonic() - began,
        text=answer.message,
        refused=None if answer.reason == "wrong_version" else answer.message.rpartition("; ")[2],
        lets_in=WOULD_LET_IN in answer.message,
    )


def _no_answer(text: str) -> ServiceAnswer:
    return ServiceAnswer(answered=False, protocol_version=None, seconds=None, text=text)


def _hello(token: str) -> Hello:
    host = socket.gethostname()
    return Hello(
        protocol_version=ASKING_VERSION,
        token=token,
        agent_id=f"check-{host}",
        session_id="check",
        name="check",
        host=host.partition(".")[0],
        job="check",
        software_version=__version__,
        pid=os.getpid(),
    )


def _first_message(connection: socket.socket) -> object:
    deframer = Deframer()
    while data := connection.recv(65_536):
        for payload in deframer.ingest_bytes(data):
            return decode_message(payload)
    return None


def speaks_our_version(answer: ServiceAnswer) -> bool:
    """Whether the service speaks the protocol of this installation's agents."""
    return answer.protocol_version == PROTOCOL_VERSION


@dataclass(frozen=True, slots=True, kw_only=True)
class ClockOffset:
    """How far this node's clock is ahead of another's."""

    seconds: float
    uncertainty_seconds: float


def clock_offset(page: str, credentials: Credentials | None = None) -> ClockOffset | None:
    """This clock minus that of the host that serves a page, from its Date header; None if it does not say.

    The header has whole seconds: it tells clocks that are off by seconds, no more. *Source:* RFC 9110, 6.6.1.
    """
    if not page.startswith(("http://", "https://")):
        return None
    context = (credentials or Credentials()).context() if page.startswith("https://") else None
    before = time.time()
    try:
        with urllib.request.urlopen(page, timeout=_SERVICE_SECONDS, context=context) as answer:
            date = answer.headers.get("Date")
    except urllib.error.HTTPError as error:
        date = error.headers.get("Date")
        error.close()
    except (OSError, ValueError):
        return None
    after = time.time()
    try:
        told = parsedate_to_datetime(date).timestamp() + 0.5 if date else None
    except ValueError:
        return None
    if told is None:
        return None
    return ClockOffset(seconds=(before + after) / 2 - told, uncertainty_seconds=0.5 + (after - before) / 2)
