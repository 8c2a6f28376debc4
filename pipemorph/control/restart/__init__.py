"""Restarts of ranks in pods: presence of pods, exits of ranks, and the policy for what follows."""
