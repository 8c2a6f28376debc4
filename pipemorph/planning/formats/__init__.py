"""Reads and writes plans as JSON and as torch's CSV."""
