"""Positions of ranks: coordinates, groups, machines and devices."""
