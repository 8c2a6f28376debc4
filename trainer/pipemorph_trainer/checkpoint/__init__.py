"""Checkpoints: state on disk, in memory, and in the memory of a neighbour pod."""
