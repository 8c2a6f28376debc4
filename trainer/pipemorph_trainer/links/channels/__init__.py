"""The two routes of messages between neighbouring stages: direct, or through the engine."""
