"""Whether another plan is worth its cost, and which."""
