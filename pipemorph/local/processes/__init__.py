"""The ranks of a run as processes of this machine."""
