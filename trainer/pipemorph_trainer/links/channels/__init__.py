"""How messages travel between neighbouring stages: directly, or through the engine."""
