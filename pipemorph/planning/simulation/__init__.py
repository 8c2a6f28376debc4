"""Predicts when every op of a schedule starts and ends."""
