"""Searches for the order of ops with the least makespan."""
