"""Starts the ranks of a pod."""
