"""The plans that a rank has prepared, and the agreement of all ranks on the one to run."""
