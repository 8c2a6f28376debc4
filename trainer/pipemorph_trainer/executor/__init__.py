"""Execution of one iteration of one stage: its ops, its loss, and its waits."""
