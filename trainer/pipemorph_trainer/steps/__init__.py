"""What a pipeline does in each step, and between two: iterations, saving, and leaving."""
