"""Layouts of ranks and layers: searches for better ones, and the decision to change."""
