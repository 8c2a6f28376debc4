"""Readers of trace formats, recognized by content."""
