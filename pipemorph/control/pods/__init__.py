"""Generations of ranks: the pods that host them, how they end, and what follows."""
