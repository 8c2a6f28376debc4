"""Runs one iteration of one stage: its token, its ops, its loss, and its waits."""
