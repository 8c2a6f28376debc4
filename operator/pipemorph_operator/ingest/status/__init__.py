"""Writes the ingest's part of a job's status: its content and the time of each write."""
