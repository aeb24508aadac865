"""One real run on one GPU with everything: logs, kernels, what each cost the job, and who was right."""
