"""Runs the ranks as processes of this machine."""
