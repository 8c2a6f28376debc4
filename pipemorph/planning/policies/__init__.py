"""Schedules that follow a rule: GPipe, 1F1B, zero-bubble, interleaved and V-shaped."""
