"""The links to neighbouring stages: how ranks connect, and the two ends of a link."""
