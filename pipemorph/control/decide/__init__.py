"""Decides if another plan is worth its cost, and which one."""
