"""The interface of a stage, and the emulated stage."""
