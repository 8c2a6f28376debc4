"""The local host: runs a PipeMorphJob on one machine, with the same control loop as a cluster."""

from pipemorph.local.run import run_job

__all__ = ["run_job"]
