"""Status of a job and its conditions, from the observations of its controller."""
