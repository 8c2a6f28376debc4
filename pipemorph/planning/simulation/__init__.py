"""Predicts the start and end of every op of a schedule."""
