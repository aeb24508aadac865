"""A benchmark of alignment: which kernel ran which logged operation, with truth, scores, baselines and a bound.

    python -m benchmarks.alignment            # all tables; `-h` lists them one by one

docs/internals/alignment-benchmark.md says what the scenarios are and how to run them over another aligner.
"""
