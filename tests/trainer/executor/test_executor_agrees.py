"""The executor and the simulator run the same ops at the same times.

The real executors of all stages run in one process on one made-up clock: a thread per stage,
one of them awake at a time, links that behave as :class:`pipemorph.planning.Link` says. What
they did is compared with the simulator op by op, to the bit.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Sequence
from heapq import heappop, heappush
from typing import Any

import pytest
import torch
from drawn_plans import random_problem

from pipemorph.planning import (
    Dispatch,
    Link,
    Op,
    OpKind,
    Plan,
    Policy,
    Problem,
    Route,
    Schedule,
    StageTimes,
    plan,
    simulate,
)
from pipemorph.planning.offload import count_away_microbatches
from pipemorph.spec.mesh import Coordinate, MeshShape
from pipemorph_trainer.agent.op_selector import OpSelector
from pipemorph_trainer.agent.rank_plan import RankPlan, split_plan
from pipemorph_trainer.backward.output_structure import SINGLE_TENSOR
from pipemorph_trainer.executor import mailbox, stage_executor
from pipemorph_trainer.executor.mailbox import Mailbox
from pipemorph_trainer.executor.stage_executor import ExecutorContext, StageExecutor, StageIteration
from pipemorph_trainer.executor.waiting import CurrentWait
from pipemorph_trainer.schedule import multi_stage_runner
from pipemorph_trainer.schedule.multi_stage_runner import make_receive_limits, run_ready_ops
from pipemorph_trainer.transport.link import StageLinks
from pipemorph_trainer.transport.link_recorder import OpClock
from pipemorph_trainer.transport.message import Direction, TensorMeta

ENDING, DECIDING = 0, 1
"""Phases of one time: ends come first, as in the simulator."""
META = TensorMeta((1,), torch.float32, gradient=True)


class World:
    """Clock for all stages. A stage sleeps until a time; the earliest runs next."""

    def __init__(self, stages: int) -> None:
        self.now = 0.0
        self.wake: list[tuple[float, int] | None] = [None] * stages
        self.turns = [threading.Semaphore(0) for _ in range(stages)]
        self.events: list[tuple[float, int, int]] = []
        self.over = threading.Event()
        self.errors: list[BaseException] = []

    def sleep(self, stage: int, until: float, phase: int) -> None:
        self._at(stage, until, phase)
        self.next()
        self.turns[stage].acquire()
        if self.over.is_set():
            raise SystemExit

    def ring(self, stage: int) -> None:
        """Wake a stage that waits for messages; one in the middle of an op goes on."""
        found = self.wake[stage]
        if found is not None and found[1] == DECIDING:
            self._at(stage, self.now, DECIDING)

    def _at(self, stage: int, until: float, phase: int) -> None:
        self.wake[stage] = (until, phase)
        heappush(self.events, (until, phase, stage))

    def next(self) -> None:
        while self.events:
            at, phase, stage = heappop(self.events)
            if self.wake[stage] == (at, phase):
                self.wake[stage] = None
                self.now = at
                self.turns[stage].release()
                return
        self.stop()

    def stop(self) -> None:
        self.over.set()
        for turn in self.turns:
            turn.release()

    def run(self, bodies: list[Callable[[], None]]) -> None:
        def body(stage: int) -> None:
            self.turns[stage].acquire()
            try:
                bodies[stage]()
                self.next()
            except BaseException as error:  # noqa: BLE001  run() raises it
                if not self.over.is_set():
                    self.errors.append(error)
                self.stop()

        threads = [threading.Thread(target=body, args=(i,)) for i in range(len(bodies))]
        for stage, thread in enumerate(threads):
            self._at(stage, 0.0, DECIDING)
            thread.start()
        self.next()
        for thread in threads:
            thread.join(60)
        if self.errors:
            raise self.errors[0]


class Lane:
    """Direction of a link: its outgoing and its incoming end in one."""

    receiving = False

    def __init__(self, world: World, link: Link, sender: int, receiver: int) -> None:
        self.world, self.link = world, link
        self.sender, self.receiver = sender, receiver
        self.arrivals: list[float] = []

    def begin_batch(self, batch: Any) -> None:
        pass

    def slot_free_at(self) -> float:
        bound = self.link.outstanding
        return self.arrivals[-bound] if bound and len(self.arrivals) >= bound else 0.0

    def send(self, microbatch: int, tensors: Any) -> None:
        assert microbatch == len(self.arrivals), "messages leave in microbatch order"
        if (clear := self.slot_free_at()) > self.world.now:
            self.world.sleep(self.sender, clear, ENDING)
        queues = self.link.queues
        busy = self.arrivals[-queues] if queues and len(self.arrivals) >= queues else 0.0
        self.arrivals.append(max(self.world.now, busy) + self.link.delay)
        self.world.ring(self.receiver)

    def record_sent(self, messages: int) -> None:
        """Post nothing."""

    def ready_at(self, microbatch: int) -> float | None:
        return self.arrivals[microbatch] if microbatch < len(self.arrivals) else None

    def pop_message(self, microbatch: int) -> list[torch.Tensor]:
        return [torch.zeros(1)]


class End:
    """Part of a LinkEnd that the executor uses."""

    class socket:
        lost = None

        @staticmethod
        def read_arrived() -> None:
            pass

    def __init__(self, link: int, peer: int, incoming: Lane, outgoing: Lane) -> None:
        self.link, self.peer_rank, self.peer_stage = link, peer, peer
        self.incoming, self.outgoing = incoming, outgoing
        self.sends = Direction.FORWARD if peer > link else Direction.BACKWARD

    def handle_control_messages(self) -> None:
        """Do nothing, as links cannot break here."""

    def all_consumed(self) -> bool:
        return True


class Runner:
    """Ops that take their time on the world's clock."""

    split = "emulated"
    structure = SINGLE_TENSOR

    def __init__(self, world: World, stage: int, times: StageTimes) -> None:
        self.world, self.stage, self.times = world, stage, times

    def _take(self, seconds: float) -> tuple[torch.Tensor, ...]:
        self.world.sleep(self.stage, self.world.now + seconds, ENDING)
        return (torch.zeros(1),)

    def begin_iteration(self, **_: Any) -> None:
        pass

    def run_forward(
        self, *_: Any, offload: bool = False, recompute: bool = False
    ) -> tuple[torch.Tensor, ...]:
        assert not recompute or self.times.recompute
        return self._take(self.times.forward)

    def recompute_forward(self, _: int) -> None:
        self._take(self.times.forward)

    def offload_activations(self, _: int) -> int:
        self._take(self.times.offload_copy or 0)
        return 1

    fetch_activations = offload_activations

    def reclaim_memory(self) -> None:
        pass

    def backward_input(self, *_: Any) -> tuple[torch.Tensor, ...]:
        return self._take(self.times.backward_input)

    def backward_weight(self, *_: Any) -> None:
        self._take(self.times.backward_weight)

    def run_fused_backward(self, *_: Any) -> tuple[torch.Tensor, ...]:
        return self._take(self.times.whole_backward)


class Poller:
    def __init__(self, world: World, stage: int) -> None:
        self.world, self.stage = world, stage

    def wait(self, seconds: float, *, watch_input: bool) -> bool:
        self.world.sleep(self.stage, self.world.now + seconds, DECIDING)
        return True


def executors(world: World, problem: Problem, placement: Sequence[int]) -> list[StageExecutor]:
    """The executor of each stage, ``placement`` saying which sleeper of the world runs it."""
    last = problem.stage_count - 1
    # A link within a rank takes no time.
    links = [
        Link() if placement[i] == placement[i + 1] else link for i, link in enumerate(problem.links)
    ]
    down = [Lane(world, link, placement[i], placement[i + 1]) for i, link in enumerate(links)]
    up = [Lane(world, link, placement[i + 1], placement[i]) for i, link in enumerate(links)]

    def boundary(rank: int) -> Callable[[], None]:
        """Callback between two ops: all that ends now ends before this rank decides."""
        return lambda: world.sleep(rank, world.now, DECIDING)

    made = []
    mail: dict[int, Mailbox] = {}
    for stage, rank in enumerate(placement):
        coordinate = Coordinate(rank, MeshShape(last + 1), stage)
        above = End(stage - 1, stage - 1, down[stage - 1], up[stage - 1]) if stage else None
        below = End(stage, stage + 1, up[stage], down[stage]) if stage < last else None
        waiting = CurrentWait(str(coordinate))
        mail.setdefault(
            rank,
            Mailbox(
                [],
                poller=Poller(world, rank),  # type: ignore[arg-type]
                waiting=waiting,
                deadline=1e3,
                between=boundary(rank),
            ),
        )
        executor = StageExecutor(
            coordinate,
            Runner(world, rank, problem.stages[stage]),  # type: ignore[arg-type]
            StageLinks(above, below),  # type: ignore[arg-type]
            ExecutorContext(
                mailbox=mail[rank], op_clock=OpClock(), between_ops=boundary(rank),
                on_last_forward=lambda _: None, reserve_slots=lambda *_: None,
            ),
        )  # fmt: skip
        executor.input_metas = (META,) if stage else ()
        executor.output_metas = (META,) if stage < last else ()
        made.append(executor)
    return made


def execute(
    chosen: Plan, problem: Problem, monkeypatch: pytest.MonkeyPatch
) -> list[list[tuple[OpKind, int, float, float]]]:
    """Ops that the executors of all stages ran: kind, microbatch, start, end."""
    mesh = MeshShape(problem.stage_count)
    if problem.ranks is not None:
        each = problem.stage_count // problem.ranks
        mesh = MeshShape(problem.stage_count, stages_per_rank=each, placement=problem.placement)
    plans = split_plan(chosen, mesh)
    world = World(len(plans))
    for module in (stage_executor, mailbox, multi_stage_runner):
        monkeypatch.setattr(module, "time", lambda: world.now)
    made = executors(world, problem, mesh.pp_indices)
    done: dict[int, Any] = {}
    bodies = []
    for mine in plans:

        def body(mine: RankPlan = mine) -> None:
            held = {stage.stage: made[stage.stage] for stage in mine.stages}
            for stage in mine.stages:
                now = StageIteration(
                    ops=mine.orders[stage.stage], iteration=1,
                    device_limit=stage.device_limit, recompute=stage.recompute,
                    receives=(make_receive_limits(stage.above), make_receive_limits(stage.below)),
                )  # fmt: skip
                done[stage.stage] = held[stage.stage].begin_iteration(now)
            if chosen.dispatch is Dispatch.GUIDED:
                for _ in run_ready_ops(
                    OpSelector(mine), held, made[mine.stages[0].stage].mailbox, pace=None
                ):
                    pass
                return
            for each, op in mine.order:
                held[each].run_op(op.kind, op.microbatch)

        bodies.append(body)
    world.run(bodies)
    return [
        [(op.kind, op.microbatch, op.start, op.end) for op in done[stage].ops]
        for stage in range(problem.stage_count)
    ]


@pytest.mark.parametrize("dispatch", list(Dispatch))
def test_op_by_op(dispatch: Dispatch, monkeypatch: pytest.MonkeyPatch) -> None:
    """Plans made for no delay, run under one: where static and guided differ most."""
    rng = random.Random(7)
    differ = 0
    for _ in range(120):
        problem = random_problem(rng)
        policy = rng.choice((Policy.ONE_F_ONE_B, Policy.ZERO_BUBBLE, Policy.PIPEMORPH))
        planned = plan(problem.with_delays([0.0] * len(problem.links)), policy)
        chosen = planned.to_plan(1, (Route.DIRECT,) * len(problem.links), dispatch)
        expected = simulate(planned.schedule, problem, dispatch, waits=chosen.waits)
        found = execute(chosen, problem, monkeypatch)
        assert found == [[op[:4] for op in ops] for ops in expected.stages], problem
        differ += expected.schedule != planned.schedule
    assert (differ > 20) is (dispatch is Dispatch.GUIDED)


@pytest.mark.parametrize("dispatch", list(Dispatch))
def test_op_by_op_with_activations_that_leave(
    dispatch: Dispatch, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Equal microbatches go to host memory or are dropped, at the same times, though a fixed
    order and guided dispatch choose different ones."""
    rng = random.Random(13)
    copied = dropped = 0
    for _ in range(120):
        problem = random_problem(rng, offloads=True)
        policy = rng.choice((Policy.ONE_F_ONE_B, Policy.ZERO_BUBBLE, Policy.PIPEMORPH))
        planned = plan(problem.with_delays([0.0] * len(problem.links)), policy)
        chosen = planned.to_plan(1, (Route.DIRECT,) * len(problem.links), dispatch)
        # Policy pipemorph offloads where it pays only.
        limited = planned.problem.with_delays([link.delay for link in problem.links])
        assert chosen.device_limits == limited.list_device_limits()
        expected = simulate(planned.schedule, limited, dispatch, waits=chosen.waits)
        found = execute(chosen, limited, monkeypatch)
        assert found == [[op[:4] for op in ops] for ops in expected.stages], limited
        assert chosen.recompute == limited.list_recompute_flags()
        ran = tuple(tuple(Op(kind, m) for kind, m, *_ in ops) for ops in found)
        away = count_away_microbatches(
            Schedule(problem.microbatches, ran),
            limited.list_device_limits(),
            limited.list_recompute_flags(),
        )
        copied += sum(away.offloaded)
        dropped += sum(away.recomputed)
    assert min(copied, dropped) > 50, "in all of these"


def test_the_paper_example(monkeypatch: pytest.MonkeyPatch) -> None:
    """S=4, N=12, 20 ms on link 0: 440 ms in the fixed order, 410 ms guided."""
    ten = StageTimes(forward=10, backward_input=10, backward_weight=10)
    quiet = Problem(microbatches=12, stages=(ten,) * 4, links=(Link(),) * 3)
    planned = plan(quiet.with_warmup([7, 5, 3, 1]), Policy.ZERO_BUBBLE)
    slow = quiet.with_delays([20, 0, 0])
    took = {}
    for mode in Dispatch:
        found = execute(planned.to_plan(1, (Route.DIRECT,) * 3, mode), slow, monkeypatch)
        took[mode] = max(ops[-1][3] for ops in found)
    assert took == {Dispatch.STATIC: 440, Dispatch.GUIDED: 410}


@pytest.mark.parametrize("dispatch", list(Dispatch))
@pytest.mark.parametrize(
    ("policy", "limited"),
    [
        (Policy.ONE_F_ONE_B_INTERLEAVED, ""),
        (Policy.ZERO_BUBBLE_V, ""),
        (Policy.PIPEMORPH, "offload"),
        (Policy.PIPEMORPH, "recompute"),
    ],
)
def test_op_by_op_with_several_stages_per_rank(
    policy: Policy, limited: str, dispatch: Dispatch, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Plans made for half of the actual delays. ``limited``: how activations leave the device."""
    rng = random.Random(11)
    limits: dict[str, Any] = {
        "": {},
        "offload": {"device_limit": 2, "offload_copy": 1 / 128},
        "recompute": {"in_flight_limit": 2, "recompute_limit": 6},
    }[limited]
    gone = differ = 0
    for _ in range(30):
        ranks, n = rng.randint(1, 4), rng.choice((1, 2, 4, 8))
        rounds = max(1, n // ranks)
        stages = ranks * (2 if policy is Policy.ZERO_BUBBLE_V else rng.randint(1, 3))
        problem = Problem(
            microbatches=n // rounds * rounds,
            stages=tuple(
                StageTimes(
                    forward=rng.randint(1, 12) / 128,
                    backward_input=rng.randint(1, 12) / 128,
                    backward_weight=rng.randint(1, 12) / 128,
                    **limits,
                )
                for _ in range(stages)
            ),
            links=tuple(Link(delay=rng.choice((0, 7, 40)) / 128) for _ in range(stages - 1)),
            ranks=ranks,
            placement="v" if policy is Policy.ZERO_BUBBLE_V else "interleaved",
        )
        half = [link.delay / 2 for link in problem.links]
        planned = plan(problem.with_delays(half), policy)
        chosen = planned.to_plan(1, (Route.DIRECT,) * len(half), dispatch)
        problem = planned.problem.with_delays([link.delay for link in problem.links])
        away = count_away_microbatches(
            planned.schedule, problem.list_device_limits(), problem.list_recompute_flags()
        )
        gone += sum(away.recomputed if limited == "recompute" else away.offloaded)
        expected = simulate(planned.schedule, problem, dispatch, waits=chosen.waits)
        found = execute(chosen, problem, monkeypatch)
        assert found == [[op[:4] for op in ops] for ops in expected.stages], problem
        differ += expected.schedule != planned.schedule
    assert not limited or gone > 20, "in all of these"
    assert (differ > 2) is (dispatch is Dispatch.GUIDED)
