"""What the links of all jobs, and checks by hand, tell about the network below them."""
