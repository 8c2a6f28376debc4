"""Ranks of a job: coordinates, process groups, machines and devices."""
