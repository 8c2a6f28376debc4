"""Steps of a pipeline, and the work between two: iterations, saving, and ending."""
