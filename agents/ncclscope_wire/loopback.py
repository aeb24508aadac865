"""Loopback addresses: on all others agent and service insist on TLS and authentication."""

from __future__ import annotations

import ipaddress


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach what listens at this host or address, in brackets or not."""
    try:
        return ipaddress.ip_address(host.strip("[]").partition("%")[0]).is_loopback
    except ValueError:
        return host.lower() in {"localhost", "localhost.localdomain", "ip6-localhost"}
