"""The PipeMorph operator: turns PipeMorphJobs into pods and reports their progress in status.

Decisions are pure functions (``policy``, ``children``, ``reconcile.decide``); effects are at the
edge (``cluster``, ``reconcile.reconciler``). The ingest (``ingest``) is a separate process.
"""
