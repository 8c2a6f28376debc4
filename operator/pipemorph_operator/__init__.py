"""The PipeMorph operator: turns PipeMorphJobs into pods and reports their progress in status.

Decisions are pure functions (``policy``, ``resources``, ``reconcile.decide``); effects are at the
edge (``kube``, ``reconcile.reconciler``). The ingest (``ingest``) is a separate process.
"""
