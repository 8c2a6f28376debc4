"""What a run leaves: report, timeline, traces."""
