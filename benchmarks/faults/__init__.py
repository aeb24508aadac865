"""Faults against real agents and a real service: what was sent, stored, stored twice, and lost.

    python -m benchmarks.faults [NAME...] [--times F] [--list]

Each fault has a world of its own: a writer that appends operations to real log files, agent and service as processes,
killed with SIGKILL. "Sent" is what the writer wrote, each operation with a number of its own; "stored" is what the
service's parquet files hold after it was stopped at last. Lost may only be what was gone before anybody could read it,
and each log that lost something has to have a gap: "gaps" is what the service has counted of them. Recovery is from the
end of a fault until the service shows all that had been written by then and could be read. Service and agent of most
worlds are forked from a process that has imported all already: a start takes as long as its own work, so there can be
hundreds.
"""
