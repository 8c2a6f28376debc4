"""The plans of a rank, and how ranks agree on the one that runs."""
