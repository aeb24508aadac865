"""The page's views as plain records: overview, one communicator, one rank, timeline, traffic, findings, health."""
