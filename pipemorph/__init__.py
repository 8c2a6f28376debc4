"""PipeMorph core: what a resilient pipeline should do. No torch, no Kubernetes.

The core plans schedules, simulates them, watches link health and decides when a
new plan is worth its cost. The trainer executes what it decides; the operator (or
``pipemorph run`` on one machine) hosts it.
"""

__version__ = "0.1.0"
