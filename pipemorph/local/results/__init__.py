"""The results of a run: report, timeline, traces."""
