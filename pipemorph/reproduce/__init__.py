"""Comparison of this planner, control loop and trainer with the published figures of "Attack of the
Bubbles" (NSDI '26).

``published.json`` has their figures, each group with its source. An experiment of
:mod:`pipemorph.reproduce.experiments` computes the same figure here, by simulation or by an
emulated run. None needs a GPU.
"""
