"""Plans as JSON and as torch's CSV."""
