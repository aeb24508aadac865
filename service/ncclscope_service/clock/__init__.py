"""All hosts on one clock: offset and drift of each, with an interval, from operations that end together."""
