"""Guided dispatch: of its ready ops, a rank runs the first in the plan's order.

A late message then holds up only what needs it. The first op of the plan's order that a rank has
not run is *in turn*. Others, of any of its stages, run out of turn, within these limits:

- A stage never holds more microbatches in flight than its plan does, :attr:`Guide.caps`.
- Each kind of op of a stage runs in microbatch order, and fused and split backwards are those of
  the plan.
- Some plans let a rank idle though an op is ready, since a more urgent one is about to arrive. The
  rank runs nothing before such an op, :attr:`Guide.waits`. So nothing runs out of turn while
  messages arrive as planned: the order then is the plan's.

Guided dispatch cannot deadlock. Take the order of time in which the plan itself would run, and of
all ranks' ops that have not run the first one in it. It is in turn on its rank. What it waits for
comes earlier, so it has run and its message arrives. No limit forbids it: what the plan runs before
it has run, so that no more is in flight than in the plan at that point; and where the device has
no room for it, a W can run (:mod:`pipemorph.planning.offload`). This needs sends that never wait
for the receiver to run an op: the engine keeps bytes at the sender, and the direct route has
receives for all that can come (``agent/receives.py`` in the trainer).
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Guide:
    """What guided dispatch follows. One entry per rank (``caps``: per stage).

    - ``codes[i]``: the plan's order, as in :class:`~pipemorph.planning.simulation.core.Ran`.
    - ``waits[i]``: positions of ops before which nothing runs in their turn.
    - ``caps[i]``: F out of turn only while fewer microbatches than this are in flight.
    """

    codes: tuple[bytes, ...]
    waits: tuple[tuple[int, ...], ...]
    caps: tuple[int, ...]
