"""Structure of a job: ranks, communicators without a name, parallelism, iterations, and its end."""
