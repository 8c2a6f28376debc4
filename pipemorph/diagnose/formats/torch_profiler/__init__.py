"""Reader of the Chrome traces that ``torch.profiler`` writes, one or more for each rank."""
