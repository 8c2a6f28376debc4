"""Commands that show what a run leaves."""
