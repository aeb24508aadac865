"""What a training job should compute, hold and send, worked out from its description. Pure: no files, no clocks."""
