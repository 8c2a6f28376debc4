"""What a rank measures and reports: to its agent, as metrics, and as traces."""
