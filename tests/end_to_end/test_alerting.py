"""From a fault of the demo to a webhook, through a real Prometheus and Alertmanager, and back when it heals."""

from __future__ import annotations

from pathlib import Path

import pytest
from benchmarks.alerting import missing_programs, run

pytestmark = pytest.mark.slow


def test_a_slow_link_reaches_the_webhooks_under_its_name_and_is_resolved_when_it_heals(tmp_path: Path) -> None:
    if missing := missing_programs():
        pytest.skip(f"needs {' and '.join(missing)} (Debian: apt install {' '.join(missing)})")
    seen = run(tmp_path, first=110, until=260, factor=0.4)
    assert seen.opened is not None, "the service's own webhook was not called"
    assert seen.firing is not None, "Alertmanager called no webhook"
    assert seen.named_hosts == seen.slow_host
    assert seen.closed is not None
    assert seen.resolved is not None
    assert seen.slow < seen.opened < seen.closed
    assert seen.notifications == 1, "one constant fault is one notification"
    assert seen.is_whole()
