"""The service: aligns, joins, puts ranks on one clock, measures, detects, and shows."""
