"""Parameters and gradients across replicas, and checkpoints."""
