"""Tools around a training job that leave it untouched: the job as a child, and nsys in short sessions beside it.

Only Python's own library, 3.10 or newer: in Kubernetes this package is put beside the trainer as one file
(`ncclscope capture --install DIR`) and runs on the Python of the trainer's image.
"""
