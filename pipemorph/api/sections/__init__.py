"""The sections of the job spec, a module for each."""
