"""PipeMorph core: decides how a pipeline adapts. Needs neither torch nor Kubernetes.

The core plans schedules, simulates them, monitors link health and decides when a new plan is worth
its cost. The trainer executes its plans; the operator (or ``pipemorph run`` on one machine) hosts
it.
"""

__version__ = "0.1.0"
