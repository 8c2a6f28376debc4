"""Measurements of a rank: reported to its agent, as metrics, and as traces."""
