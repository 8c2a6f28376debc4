"""The local host: runs a PipeMorphJob on one machine, with the same control loop as a cluster."""
