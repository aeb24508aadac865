"""Which kernel ran each logged operation."""
