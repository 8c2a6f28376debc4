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
    Sequence[float],  # per stage: extra time of an F whose activations leave
    Sequence[float],  # per stage: extra time of a backward whose activations return
    Sequence[int],  # device limit per stage, 0 if no activations leave
    Sequence[float],  # per rank: time after its last op
    Sequence[float],  # per rank: earliest start
    Sequence[Sequence[int]],  # per rank: its stages; an op's chunk is an index in them
    Sequence[float],  # per stage: memory of one microbatch in flight
    float,  # memory of a rank, infinity for no limit
    Sequence[Sequence[float]],  # per stage: factor of each microbatch's times; empty: all equal
]

Rows = list[list[float]]

PackedExecution = tuple[list[bytes], Rows, Rows, Rows, Rows, Rows]
"""The fields of :class:`pipemorph.planning.simulation.execution.Execution`."""

def execute_in_order(
    costs: Costs,
    ranks: Sequence[bytes],
    delay_at: Callable[[int, float], float] | None,
    transfer_at: Callable[[int, float], float] | None,
) -> PackedExecution:
    """See :func:`pipemorph.planning.simulation.execution.execute_in_order`. All functions of this
    module raise ValueError for arguments that do not fit together."""

def compute_makespan(costs: Costs, ranks: Sequence[bytes]) -> float:
    """End of the last op; infinity on a deadlock. Releases the GIL."""

def schedule_online(
    costs: Costs,
    caps: Sequence[int],
    warmup: Sequence[int],
    exact_warmup: bool,
    fused: Sequence[bool],
) -> tuple[list[bytes], float]:
    """See :func:`pipemorph.planning.simulation.execution.schedule_online`. Releases the GIL."""

def execute_guided(
    costs: Costs,
    order: Sequence[bytes],
    waits: Sequence[Sequence[int]],
    caps: Sequence[int],
    delay_at: Callable[[int, float], float] | None,
    transfer_at: Callable[[int, float], float] | None,
) -> PackedExecution:
    """See :func:`pipemorph.planning.simulation.execution.execute_guided`."""

def compute_guided_makespan(
    costs: Costs,
    order: Sequence[bytes],
    waits: Sequence[Sequence[int]],
    caps: Sequence[int],
) -> float:
    """End of the last op of :func:`execute_guided`; infinity on a deadlock. Releases the GIL."""

def find_planned_waits(
    costs: Costs, order: Sequence[bytes], peaks: Sequence[int]
) -> list[list[int]]:
    """See :func:`pipemorph.planning.simulation.execution.find_planned_waits`. ``peaks``: most
    microbatches in flight by stage. Releases the GIL."""

def compute_jittered_makespans(
    costs: Costs,
    order: Sequence[bytes],
    waits: Sequence[Sequence[int]],
    caps: Sequence[int],
    most: float,
    draws: int,
) -> Sequence[float]:
    """Releases the GIL. See
    :func:`pipemorph.planning.simulation.execution.compute_jittered_makespans`."""

def search_order(
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
    or empty. ``start``: an order that bounds the result's makespan, or empty. ``near``: gap to the
    bound, as a fraction, at which the search stops. Releases the GIL."""

def is_valid(
    microbatches: int,
    stages_of: Sequence[Sequence[int]],
    ranks: Sequence[bytes],
    numbers: Sequence[Sequence[int]],
    caps: Sequence[int],
    device_limits: Sequence[int],
) -> bool:
    """True if :func:`pipemorph.planning.validator.validate` accepts the schedule. ``numbers``: the
    microbatch of each op; ``caps`` and ``device_limits``: 0 for no limit."""

def order_microbatches(
    costs: Costs,
    order: Sequence[bytes],
    waits: Sequence[Sequence[int]],
    caps: Sequence[int],
    guided: bool,
    enough: float,
    effort: int,
) -> tuple[list[int], float]:
    """See :mod:`pipemorph.planning.microbatch_order`. The order of ``costs`` is tried first; the
    search stops at the makespan ``enough``, or once ``effort`` ops were run. Releases the GIL."""

def compute_lower_bound(costs: Costs, caps: Sequence[int], any_order: bool) -> float:
    """Lower bound of the makespan of all schedules. ``any_order``: in any order of the
    microbatches, not only that of the factors."""

def compute_tight_lower_bound(
    costs: Costs, caps: Sequence[int], makespan: float, effort: int
) -> float:
    """Larger lower bound, if ``effort`` suffices: between :func:`compute_lower_bound` and
    ``makespan``, that of some schedule. ``effort`` counts states of stages, about 10 ns each."""
