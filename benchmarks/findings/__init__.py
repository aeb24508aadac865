"""What the detectors say of simulated jobs whose faults are known: who was named, who wrongly, and how soon.

    python -m benchmarks.findings            # all tables; `-h` lists them one by one

Every job goes the whole way, second by second of its own time: log lines as they are written and exports as they
finish, through the agent's readers and the service's pipeline. Beside the findings stands what two peers' rules would
have said on the same kernels. Another table has the false alarms of healthy series over months, window by window.
"""
