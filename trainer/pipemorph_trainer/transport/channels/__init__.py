"""Channels of the two routes between neighbouring stages: direct, and through the engine."""
