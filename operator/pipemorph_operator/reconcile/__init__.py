"""Turns a change of a job into its objects and status. Start with ``decide``."""
