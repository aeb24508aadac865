"""Transfer, waiting, bandwidth and limits of joined operations, by kernels or by NCCL Inspector."""
