"""What many queries have in common."""

from __future__ import annotations

from typing import Final

JOB: Final = 'job=~"$job"'
"""The matcher that every series of a training job gets."""

KIND: Final = f'{JOB}, parallelism=~"$parallelism"'

LARGE: Final = 'size_class=~"16MiB|256MiB|inf"'
"""Messages that are limited by bandwidth; smaller ones are limited by latency."""


TOGETHER: Final = 'parallelism!~"PP|EMBEDDING"'
"""Groups that are meant to arrive together; ranks of different pipeline stages wait for each other by design."""


def rate(metric: str, matchers: str = "") -> str:
    """A counter's growth per second, over a range that fits the scrape interval and the width of the panel."""
    selector = f"{{{matchers}}}" if matchers else ""
    return f"rate({metric}{selector}[$__rate_interval])"


def wait_share(by: str, matchers: str) -> str:
    """Share of the kernel time that was waiting; `by` such as "by (job) ", or empty for all series in one."""
    waited, ran = (rate(f"ncclscope_{name}_seconds_total", matchers) for name in ("wait", "joined_kernel"))
    return f"sum {by}({waited}) / sum {by}({ran})"
