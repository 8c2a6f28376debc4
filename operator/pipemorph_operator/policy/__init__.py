"""Policies of the operator, one per module. Pure functions of facts and the current time."""
