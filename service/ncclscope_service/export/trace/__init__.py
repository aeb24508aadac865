"""The Chrome trace of a run: events, tracks, counters and what a click on them shows."""
