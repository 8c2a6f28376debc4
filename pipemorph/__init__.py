"""PipeMorph core: decides how a pipeline adapts. Needs neither torch nor Kubernetes.

The core plans schedules, simulates them, monitors link health and decides when a new plan is worth
its cost. The trainer executes its plans; the operator (or ``pipemorph run`` on one machine) hosts
it.
"""


def __getattr__(name: str) -> str:
    """Read ``__version__`` from the package's metadata, which takes an import of 30 ms."""
    if name != "__version__":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib.metadata import version

    return version(__name__)
