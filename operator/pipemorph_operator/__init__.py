"""The PipeMorph operator: turns PipeMorphJobs into pods and tells their story in status.

Decisions are pure functions (``policy``, ``children``, ``decide``); effects are at the edge
(``api``, ``reconcile``, ``handlers``). The ingest (``ingest``) is a process of its own.
"""
