"""Searches for the op order with the shortest makespan."""
