"""Jobs that are only observed: their shape, steps and states, from the ops that ranks report."""
