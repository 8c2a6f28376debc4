"""The plans a rank has prepared, and the agreement of all ranks on the one that runs."""
