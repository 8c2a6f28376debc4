"""Status of a job and its conditions, from what its controller has observed."""
