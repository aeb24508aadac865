"""Reads exports of Nsight Systems, table by table, into batches."""
