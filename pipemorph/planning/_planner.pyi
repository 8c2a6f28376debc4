"""The compiled search (``csrc/planner``). Times in any one unit."""

from collections.abc import Sequence

Costs = tuple[
    int,  # microbatches
    tuple[Sequence[float], Sequence[float], Sequence[float]],  # F, B and W per stage
    Sequence[float],  # delay per link
    Sequence[int],  # queues per link, 0 for no bound
    Sequence[int],  # sends outstanding per link, 0 for no bound
    Sequence[bool],  # per link: both directions share the queues
    Sequence[int],  # in-flight cap per stage
    Sequence[int],  # warm-up per stage, or none at all
]

def search(
    costs: Costs,
    paper_warmup: Sequence[int],
    start: Sequence[bytes],
    listing_effort: int,
    shifting_effort: int,
) -> tuple[list[bytes], float, float]:
    """Order (0 F, 1 B, 2 W per op and stage), makespan and lower bound. ``start``: an order to
    do no worse than, or empty. Runs without the interpreter's lock. Raises ValueError where the
    lengths do not fit together."""

def lower_bound(costs: Costs) -> float:
    """What no schedule can beat."""
