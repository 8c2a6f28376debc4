"""Detection of slow links, stages and reductions, and of failing rails, in ranks and agent."""
