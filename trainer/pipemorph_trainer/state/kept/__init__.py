"""A rank's state in shared memory, which outlives its process."""
