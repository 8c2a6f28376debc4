"""Experiments of the comparison with the paper, by kind."""
