"""The operator's policies, one per module. Pure functions of facts and the current time."""
