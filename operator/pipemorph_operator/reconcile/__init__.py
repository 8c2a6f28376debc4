"""From a change of a job to its objects and its status: start reading in ``decide``."""
