#!/bin/sh
# /etc/ncclscope/ncclscope-site.sh: what prolog, epilog and task prolog of ncclscope go by. Sourced.
# shellcheck disable=SC2034

# Below it each job has a folder for its logs, on a disk of the node. It is root's, and nobody else may write there.
NCCLSCOPE_DIR=/var/log/nccl
# Who reads them: the user and group that the agent runs as.
NCCLSCOPE_USER=ncclscope
NCCLSCOPE_GROUP=nccl
# The program, for nodes whose agent is not a unit of systemd.
NCCLSCOPE_BIN=/opt/ncclscope/bin/ncclscope
# The agent's settings (NCCLSCOPE_CONNECT and so on; docs/settings.md). Where the agent is not a unit, the CA and a
# token that NCCLSCOPE_USER may read too.
NCCLSCOPE_AGENT_ENV=/etc/ncclscope/agent.env
# What `ncclscope env --format task-prolog` printed; %j stands for the job's folder.
NCCLSCOPE_TASK_ENV=/etc/ncclscope/task-prolog.env
# For how many days the logs of a job stay when it has ended.
NCCLSCOPE_KEEP_DAYS=3
# How long the epilog waits for the agent to hand over the rest.
NCCLSCOPE_STOP_SECONDS=20
