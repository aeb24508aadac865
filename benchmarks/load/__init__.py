"""python -m benchmarks.load: a real service under the load of a large job, and of more than it can bear.

A simulated job of 512 ranks on 64 hosts is written once and a stretch of it repeated for ever, with the times, counts
and lines that it would have. 64 agents (their session, link and windows are the real ones, only the files are not)
send it over 64 connections to `ncclscope serve`, at so many operations per second each; of each host, exports of
some stretches come as well. Phases follow one another: the load, more than that, and the load again. Nothing is
dropped by the agents: what the service does not take waits in the files, as it does in front of a real agent.

Times are CPU seconds of the processes; what waits is said in seconds of the job. The load average of the machine
stands with each table: the figures of a busy one are worse. See docs/benchmarks.md.
"""
