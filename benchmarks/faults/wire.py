"""A network of the kernel's own between agent and service: a namespace for the agent, and a pair of Ethernet devices.

What the relay cannot do happens here: segments are lost, late and out of order below TCP, nobody is told when a cable
is pulled, and a service that dies meanwhile leaves a connection that only one end believes in. Needs root and iproute2;
`tc netem` where the kernel has it (sch_netem), else a queue that is too narrow and drops (sch_tbf).
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Generator
from contextlib import contextmanager
from typing import Final

_NETEM: Final = ("netem", "delay", "40ms", "30ms", "reorder", "30%", "loss", "5%", "duplicate", "2%")
_NARROW: Final = ("tbf", "rate", "400kbit", "burst", "3000", "limit", "6000")
"""A few segments fit its queue, the others of a window are dropped."""


class NotHereError(Exception):
    """This machine cannot do it; the text says why."""


class Wire:
    """The network, while it is there. `namespace` is where the agent runs, `address` where the service listens."""

    def __init__(self, name: str, number: int) -> None:
        self.namespace = name
        # 198.18.0.0/15 is for tests of networks (RFC 2544).
        self.address = f"198.18.{number >> 6}.{4 * (number & 63) + 1}"
        self._far = f"198.18.{number >> 6}.{4 * (number & 63) + 2}"
        self._near_device, self._far_device = f"{name}n", f"{name}f"

    def make(self) -> None:
        """Makes it."""
        _ip("netns", "add", self.namespace)
        _ip("link", "add", self._near_device, "type", "veth", "peer", "name", self._far_device)
        _ip("link", "set", self._far_device, "netns", self.namespace)
        _ip("address", "add", f"{self.address}/30", "dev", self._near_device)
        _ip("link", "set", self._near_device, "up")
        _ip("-n", self.namespace, "address", "add", f"{self._far}/30", "dev", self._far_device)
        _ip("-n", self.namespace, "link", "set", self._far_device, "up")
        _ip("-n", self.namespace, "link", "set", "lo", "up")

    def remove(self) -> None:
        """Removes all of it that is there."""
        subprocess.run(["ip", "link", "del", self._near_device], capture_output=True, check=False)
        subprocess.run(["ip", "netns", "del", self.namespace], capture_output=True, check=False)

    def pull(self) -> None:
        """The cable is out: nothing passes, and no end is told by the other."""
        _ip("link", "set", self._near_device, "down")

    def plug(self) -> None:
        """It is in again."""
        _ip("link", "set", self._near_device, "up")

    def spoil(self) -> str:
        """Makes both directions bad; says how."""
        how = "netem" if self._spoiled_by(*_NETEM) else "tbf"
        if how == "tbf" and not self._spoiled_by(*_NARROW):
            raise NotHereError("the kernel has neither sch_netem nor sch_tbf")
        return how

    def mend(self) -> None:
        """Makes them good again."""
        subprocess.run(["tc", "qdisc", "del", "dev", self._near_device, "root"], capture_output=True, check=False)
        far = ["tc", "-n", self.namespace, "qdisc", "del", "dev", self._far_device, "root"]
        subprocess.run(far, capture_output=True, check=False)

    def _spoiled_by(self, *discipline: str) -> bool:
        near = ["tc", "qdisc", "replace", "dev", self._near_device, "root", *discipline]
        far = ["tc", "-n", self.namespace, "qdisc", "replace", "dev", self._far_device, "root", *discipline]
        return all(subprocess.run(each, capture_output=True, check=False).returncode == 0 for each in (near, far))


@contextmanager
def wired() -> Generator[Wire]:
    """A wire for a while.

    Raises:
        NotHereError: this machine gives none.
    """
    if os.geteuid() != 0:
        raise NotHereError("only root may make network namespaces")
    if missing := [name for name in ("ip", "tc") if shutil.which(name) is None]:
        raise NotHereError(f"{' and '.join(missing)} of iproute2 is not installed")
    number = os.getpid() % 16384
    wire = Wire(f"nsc{number}", number)
    try:
        try:
            wire.make()
        except subprocess.CalledProcessError as error:
            raise NotHereError(f"no network namespace or veth pair: {error.stderr.decode().strip()}") from error
        yield wire
    finally:
        wire.remove()


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], capture_output=True, check=True)
