"""Diagnosis of any pipeline job from a trace of its ops: what it lost, why, and what would help."""
