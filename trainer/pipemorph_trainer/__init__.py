"""PipeMorph trainer: runs the stages of a pipeline and follows the plans of the core."""
