"""Explains the idle time of a schedule, and compares changes that reduce it."""
