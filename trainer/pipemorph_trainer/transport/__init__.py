"""Links to neighbouring stages: rendezvous of the ranks, and the two ends of a link."""
