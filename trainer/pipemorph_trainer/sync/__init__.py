"""Gradients, norms and tied weights across replicas and stages; checkpoints."""
