"""Sections of the job spec, a module for each."""
