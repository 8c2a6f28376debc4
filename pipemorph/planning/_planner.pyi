"""The compiled event core and search (``csrc/planner``). Times in any one unit."""

from collections.abc import Callable, Sequence

Costs = tuple[
    int,  # microbatches
    tuple[Sequence[float], ...],  # time of F, B, W and BW per stage
    Sequence[float],  # delay per link
    Sequence[float],  # transfer per link: how long one message occupies its direction
    Sequence[int],  # queues per link, 0 for no limit
    Sequence[int],  # outstanding sends per link, 0 for no limit
    Sequence[bool],  # per link: both directions share the queues
    Sequence[float],  # per stage: time for which an F is longer if its activations leave
    Sequence[float],  # per stage: time for which a backward is longer if they have left
    Sequence[int],  # device limit per stage, 0 if no activations leave
    Sequence[float],  # per rank: what follows its last op
    Sequence[float],  # per rank: when it may begin
    Sequence[Sequence[int]],  # per rank: its stages, of which an op's chunk is one
    Sequence[float],  # per stage: memory of one microbatch in flight
    float,  # memory of a rank, infinity for no limit
]

Rows = list[list[float]]

Ran = tuple[list[bytes], Rows, Rows, Rows, Rows, Rows]
"""The fields of :class:`pipemorph.planning.simulation.core.Ran`."""

def in_order(
    costs: Costs,
    ranks: Sequence[bytes],
    delay_at: Callable[[int, float], float] | None,
    transfer_at: Callable[[int, float], float] | None,
) -> Ran:
    """See :func:`pipemorph.planning.simulation.core.in_order`. Raises ValueError if the arguments
    do not fit together, as the others do."""

def makespan(costs: Costs, ranks: Sequence[bytes]) -> float:
    """The end of the last op; infinity if ranks wait for each other. Releases the interpreter's
    lock, as :func:`search` does."""

def online(
    costs: Costs,
    caps: Sequence[int],
    warmup: Sequence[int],
    exact_warmup: bool,
    fused: Sequence[bool],
) -> tuple[list[bytes], float]:
    """See :func:`pipemorph.planning.simulation.core.online`. Releases the interpreter's lock."""

def guided(
    costs: Costs,
    order: Sequence[bytes],
    waits: Sequence[Sequence[int]],
    caps: Sequence[int],
    delay_at: Callable[[int, float], float] | None,
    transfer_at: Callable[[int, float], float] | None,
) -> Ran:
    """See :func:`pipemorph.planning.simulation.core.guided`."""

def guided_makespan(
    costs: Costs,
    order: Sequence[bytes],
    waits: Sequence[Sequence[int]],
    caps: Sequence[int],
) -> float:
    """The end of what :func:`guided` runs; infinity if ranks wait for each other. Releases the
    interpreter's lock."""

def waits(costs: Costs, order: Sequence[bytes], peaks: Sequence[int]) -> list[list[int]]:
    """See :func:`pipemorph.planning.simulation.core.planned_waits`. ``peaks``: most microbatches
    in flight by stage. Releases the interpreter's lock."""

def jittered(
    costs: Costs,
    order: Sequence[bytes],
    waits: Sequence[Sequence[int]],
    caps: Sequence[int],
    most: float,
    draws: int,
) -> Sequence[float]:
    """See :func:`pipemorph.planning.simulation.core.jittered`. Releases the interpreter's lock."""

def search(
    costs: Costs,
    caps: Sequence[int],
    warmup: Sequence[int],
    paper_warmup: Sequence[int],
    start: Sequence[bytes],
    listing_effort: int,
    shifting_effort: int,
    near: float,
) -> tuple[list[bytes], float, float]:
    """Order per rank, makespan and lower bound. ``warmup``: exact number of F before the first B,
    or empty. ``start``: an order that the result must not be longer than, or empty.
    ``near``: above the bound, as a fraction, where the search stops."""

def is_valid(
    microbatches: int,
    stages_of: Sequence[Sequence[int]],
    ranks: Sequence[bytes],
    numbers: Sequence[Sequence[int]],
    caps: Sequence[int],
    device_limits: Sequence[int],
) -> bool:
    """Whether :func:`pipemorph.planning.validator.validate` accepts a schedule. ``numbers``: the
    microbatch of each op; ``caps`` and ``device_limits``: 0 for no limit."""

def lower_bound(costs: Costs, caps: Sequence[int]) -> float:
    """Lower bound of the makespan of all schedules."""

def tight_lower_bound(costs: Costs, caps: Sequence[int], makespan: float, effort: int) -> float:
    """A larger lower bound where ``effort`` is enough for it: between :func:`lower_bound` and
    ``makespan``, which a schedule has. Effort counts states of stages, of about 10 ns each."""
