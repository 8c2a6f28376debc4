"""Builds the parts of a pipeline and connects them: the only module that knows all of them."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from pipemorph.api.layout import may_change_places
from pipemorph.api.mesh import DATA
from pipemorph.errors import InputError
from pipemorph.planning import Plan
from pipemorph_trainer.agent import AgentHandle
from pipemorph_trainer.agent.messages import ControlClient, NoControl
from pipemorph_trainer.context import TrainerContext
from pipemorph_trainer.devices import own_device
from pipemorph_trainer.executor.local_stage import OwnStage, device_of
from pipemorph_trainer.executor.split.flight import LossFn
from pipemorph_trainer.executor.stages.emulated import EmulatedRunner
from pipemorph_trainer.executor.waiting import CollectiveWait, Waiting
from pipemorph_trainer.links.faults import FaultTrace
from pipemorph_trainer.links.link import LinkEnd
from pipemorph_trainer.links.message import SenderLoad
from pipemorph_trainer.links.poller import Poller
from pipemorph_trainer.links.recorder import OpClock
from pipemorph_trainer.links.rendezvous import LinkConfig, meet
from pipemorph_trainer.plans.book import PlanBook
from pipemorph_trainer.preparation import (
    MakeOptimizer,
    MakeState,
    Preparation,
    StageOrBuilder,
    State,
    build,
    modules_of,
    prepare,
)
from pipemorph_trainer.start import join, level, warnings
from pipemorph_trainer.state.extra import Extra
from pipemorph_trainer.state.gradients import Replicas
from pipemorph_trainer.state.kept.keeper import Keeper
from pipemorph_trainer.state.kept.late import LateCopies
from pipemorph_trainer.state.kept.resumed import Resumed
from pipemorph_trainer.state.kept.values import Values
from pipemorph_trainer.state.names import Names, clash, own_names
from pipemorph_trainer.state.reduction import Reducer
from pipemorph_trainer.state.ring import RingProbe
from pipemorph_trainer.state.scaler import GradScaler
from pipemorph_trainer.state.tied import Tied
from pipemorph_trainer.steps.iteration import Iterations, RankContext
from pipemorph_trainer.telemetry.metrics import open_metrics
from pipemorph_trainer.telemetry.processors import crowding
from pipemorph_trainer.telemetry.progress import leave_note
from pipemorph_trainer.telemetry.reporter import Reporter, join_agent
from pipemorph_trainer.telemetry.trace import TraceWriter
from pipemorph_trainer.topology.accelerator import Accelerator, accelerator_of
from pipemorph_trainer.topology.failures import Failures
from pipemorph_trainer.topology.part import why_fixed
from pipemorph_trainer.trackers.listeners import Listeners, OnIteration, chosen

if TYPE_CHECKING:
    from pipemorph_trainer.state.checkpoint import Checkpoints

log = logging.getLogger("pipemorph.trainer")


@dataclass(frozen=True, kw_only=True)
class Arguments:
    """The arguments of :class:`pipemorph_trainer.Pipeline` that no job replaces."""

    mesh: DeviceMesh | None
    plan: Plan | None
    split: str
    loss_fn: LossFn | None
    optimizer: torch.optim.Optimizer | MakeOptimizer | None
    control: ControlClient | None
    tied: Sequence[Any] | None
    state: State | MakeState | None
    scaler: GradScaler | None
    on_iteration: OnIteration | Sequence[OnIteration] | None


class Parts:
    """The parts of a pipeline. Each part needs only parts that were built before it.

    ``stages``, ``context``: those of :class:`pipemorph_trainer.Pipeline`; ``given``: the arguments
    that a job replaces, by name; ``arguments``: the rest. Collective; raises the same errors as the
    pipeline.
    """

    def __init__(
        self,
        stages: StageOrBuilder,
        context: TrainerContext,
        given: Mapping[str, Any],
        arguments: Arguments,
    ) -> None:
        mesh, loss_fn, scaler, control = (
            arguments.mesh, arguments.loss_fn, arguments.scaler, arguments.control
        )  # fmt: skip
        own, self.optimizer, self.state, failure, self._built = build(
            stages, arguments.optimizer, arguments.state, context=context, given=given, mesh=mesh
        )
        listeners: Sequence[OnIteration] = ()
        try:
            listeners = chosen(arguments.on_iteration)
        except InputError as error:
            failure = failure or error
        # A rank without a stage joins the others on the device that its stage probably had.
        self.device = device_of(own[0]) if failure is None else own_device(context.local_rank)
        accelerator = accelerator_of(self.device)
        if accelerator is not None:
            # Allocations that name no device then go to the stage's device.
            accelerator.enter_thread()
        directed = context.ingest_url is not None
        if control is not None:
            directed = not isinstance(control, NoControl)
        prepared, start = prepare(
            own, context, given, arguments.plan, arguments.split, failure=failure, mesh=mesh,
            loss_fn=loss_fn, tied=arguments.tied, scaler=scaler, device=self.device,
            accelerator=accelerator, directed=directed,
        )  # fmt: skip
        try:
            self.world, starts = join(context, self.device, start, mesh)
        except InputError as error:
            raise error from failure
        assert prepared is not None, "join() raises on a rank that refuses"
        self.settings = prepared.settings
        self.coordinate = self.world.coordinate
        self.placements = frozenset(held.placement for each in starts for held in each.held)
        """Placements of the parameters of all stages."""

        self.waiting = Waiting(str(self.coordinate))
        self.wait_for = CollectiveWait(self.waiting, self.settings.deadline_seconds)
        several = self.world.group(DATA) is not None
        faults = FaultTrace(
            self.settings.faults,
            self.settings.direct_duplex == "half",
            context.layout(self.coordinate.mesh),
        )
        self._device_faults = faults.of_device(self.coordinate.rank)
        self._reduction_faults = faults.of_group(self.coordinate)
        modules = modules_of(own, self.coordinate)
        if modules and several:
            self.waiting.begin("the parameters and buffers of replica 0")
            level(self.world, starts, modules, self.wait_for)
            self.waiting.end()
        self.tied: Tied | None = None
        if start.ties:
            self.waiting.begin("the tied weights of their first stage")
            self.tied = Tied(start.ties, modules, self.world, self.wait_for)
            self.tied.level()
            self.waiting.end()
        self.replicas: Replicas | None = None
        if modules and several:
            # One for all stages: their gradients are sent in one order, whatever the plans.
            whole, *others = modules.values()
            self.replicas = Replicas(
                nn.ModuleList([whole, *others]) if others else whole, self.world, self.wait_for,
                accelerator=accelerator, faults=self._reduction_faults,
            )  # fmt: skip
        self.failures = Failures(
            self.world, (p for module in modules.values() for p in module.parameters())
        )
        self.scaler = scaler
        if scaler is not None:
            scaler.attach(self.world, self.device, self.wait_for)
        if self.coordinate.rank == 0:
            for line in warnings(starts):
                log.warning(line)

        self.poller, op_clock = Poller(), OpClock()
        self.load = SenderLoad()
        self.agent: AgentHandle | None = None
        if control is None:
            control, self.agent = join_agent(context, self.world)
        self.control = control
        config = self._link_config(prepared, op_clock, faults)
        self.links = meet(
            self.coordinate, config, master_addr=context.master_addr, groups=self.world.groups,
            control=self.world.control,
        )  # fmt: skip
        self.wait_for.who_is_gone = self.links.gone
        ends = self.links.ends
        self.plans = PlanBook(
            prepared.plan, self.coordinate, ends,
            no_offload={s: each.no_offload for s, each in prepared.memory.items()},
            no_recompute={s: each.no_recompute for s, each in prepared.memory.items()},
        )  # fmt: skip
        for end in ends:
            if end.failover is not None:
                end.failover.on_broken = partial(self._on_broken, end)
        self.stages = {
            number: OwnStage(
                each, self.coordinate.of(number), loss_fn=loss_fn, split=prepared.split,
                memory=prepared.memory[number], microbatches=prepared.plan.microbatches,
                device=self.device, accelerator=accelerator,
            )
            for number, each in zip(self.coordinate.held, own, strict=True)
        }  # fmt: skip
        rails = self.links.engine.rails if self.links.engine is not None else None
        computes = accelerator is None and not any(s.emulated for s in self.stages.values())
        self.reporter = Reporter(
            self.coordinate, self.control, ends, rails=rails,
            crowding=crowding(context.local_world_size) if computes else None,
            load=self.load, metrics=open_metrics(context, self.coordinate, prepared.plan),
        )  # fmt: skip
        folder = context.trace_dir
        self.traces = {
            number: TraceWriter(
                folder,
                self.coordinate.of(number),
                emulated=each.emulated,
                limit=context.trace_bytes,
            )
            for number, each in self.stages.items()
            if folder is not None
        }
        job = context.job
        moves = job is not None and job.spec.adaptation.relayout
        self._resizes = job is not None and job.spec.parallelism.min_replicas is not None
        self._leaves = moves or self._resizes
        """Whether the host may ask ranks to leave."""
        ring = None
        # A host that cannot give ranks other places tells none.
        if moves and context.places is not None and may_change_places(self.coordinate.mesh):
            ring = RingProbe(self.world, self.wait_for, self._reduction_faults)
        self.listeners = Listeners.of(listeners, context, version=prepared.plan.version)
        self.iterations = Iterations(
            RankContext(
                world=self.world, links=self.links, stages=self.stages,
                replicas=self.replicas, reducer=self._reducer(), ring=ring,
                tied=self.tied, plans=self.plans, control=self.control,
                reporter=self.reporter, traces=self.traces, listeners=self.listeners,
                failures=self.failures, poller=self.poller, op_clock=op_clock,
                wait=self.wait_for, deadline=self.settings.deadline_seconds,
                slowed=None if self._device_faults is None else self._device_faults.hold,
            )
        )  # fmt: skip
        self._split = context.split(self.coordinate.mesh.stages)
        self._generation, self._run = context.generation, context.run
        self._place = context.rank if context.place is None else context.place
        self._leave_note = partial(leave_note, context.progress_dir, context.rank)
        self.extra = Extra(self.state, self.coordinate, self.device)
        self.checkpoints = self._open_checkpoints()
        self.keeper: Keeper | None = None
        if context.kept_dir is not None and self.settings.snapshot_iterations != 0:
            self.keeper = self._open_keeper(context.kept_dir, accelerator)

    def _reducer(self) -> Reducer | None:
        """What averages the gradients over replicas, if there are any."""
        if self.replicas is not None:
            return self.replicas.reducer
        runners = [own.runner for own in self.stages.values()]
        parameters = [
            parameter
            for runner in runners
            if isinstance(runner, EmulatedRunner)
            for parameter in runner.parameters
        ]
        if not parameters or self.world.group(DATA) is None:
            return None
        return Reducer(
            [(parameter, DATA) for parameter in parameters], self.world, self.wait_for,
            # One bucket for each.
            most=1, faults=self._reduction_faults,
        )  # fmt: skip

    def _link_config(
        self, prepared: Preparation, op_clock: OpClock, faults: FaultTrace
    ) -> LinkConfig:
        settings, max_sends = self.settings, self.settings.direct_sends
        if max_sends is None and len(self.coordinate.held) > 1:
            # The stages of a rank take turns: a bound on the sends of one could block another that
            # has not begun, and the ranks would wait for each other.
            max_sends = prepared.plan.microbatches
        return LinkConfig(
            secret=self.world.secret, device=self.device,
            deadline=settings.deadline_seconds, poller=self.poller, op_clock=op_clock,
            begin_wait=self.waiting.begin, end_wait=self.waiting.end,
            faults=faults,
            load=self.load,
            max_sends=max_sends,
            engine=prepared.engine,
        )  # fmt: skip

    def _open_keeper(self, folder: Path, accelerator: Accelerator | None) -> Keeper:
        keepers = {stage: own.keeper for stage, own in self.stages.items()}
        values = Values(
            {s: each for s, each in keepers.items() if isinstance(each, nn.Module)},
            {s: each for s, each in keepers.items() if isinstance(each, EmulatedRunner)},
            self.optimizer,
            self.extra,
        )
        every = self.settings.snapshot_iterations
        if every is None:
            # What copies take on a device nobody knows; only one is made when ranks leave.
            every = 1 if accelerator is None or not self._leaves else 0
            late = LateCopies(accelerator) if accelerator is not None and self._leaves else None
        else:
            late = LateCopies(accelerator) if accelerator is not None else None
        return Keeper(
            folder, values, self.world, self.placements, self.wait_for,
            generation=self._generation, every=every, late=late, place=self._place,
            changes=self._resizes, split=self._split,
            tell=self._leave_note,
        )  # fmt: skip

    def _open_checkpoints(self) -> Checkpoints | None:
        keepers = {s: own.keeper for s, own in self.stages.items() if own.keeper is not None}
        if self.settings.checkpoint is None or not keepers:
            return None
        # Its import takes longer than that of torch.
        from pipemorph_trainer.state.checkpoint import Checkpoints

        aliases = self.tied.aliases if self.tied is not None else {}
        return Checkpoints(
            self.settings.checkpoint,
            self.world,
            keepers,
            self.optimizer,
            aliases=aliases,
            extra=self.extra,
            wait=self.wait_for,
            run=self._run,
        )

    def _on_broken(self, end: LinkEnd, why: str) -> None:
        """A direct route broke: reserve slots, since its messages now go through the engine."""
        self.plans.reserve(self.plans.in_force)
        self.reporter.reroute(end)
        self.reporter.publish(message=f"{self.coordinate}: {end}: the direct route broke: {why}")

    def resume(self) -> Resumed:
        """Go on with the state that an earlier generation has kept, or else with the newest
        checkpoint, if requested."""
        asked, why = self.settings.checkpoint, ""
        checkpoints = self.checkpoints if asked is not None and asked.resume else None
        if self.keeper is None and self._generation > 0:
            why = "ranks keep nothing in memory"
        elif self.keeper is not None and self._generation > 0:
            found = self.keeper.resume(checkpoints.newest() if checkpoints is not None else 0)
            if isinstance(found, Resumed):
                self.keeper.began_with(found.iteration)
                return found
            why = found
        elif self.keeper is not None:
            self.keeper.clear()
        found = Resumed(0, "beginning") if checkpoints is None else checkpoints.resume()
        if self.keeper is not None:
            self.keeper.began_with(found.iteration)
        return found._replace(why="; ".join(filter(None, (why, found.why))))

    def why_fixed(self, layers: int) -> str:
        """Why the parts of the model, which has so many layers, cannot change; empty if they can.
        Collective over all ranks; the answer is the same on all."""
        modules = {s: own.module for s, own in self.stages.items() if own.module is not None}
        why = why_fixed(self._built, layers)
        if not why and self.keeper is not None:
            why = self.keeper.why_fixed()
        aliases = self.tied.aliases if self.tied is not None else {}
        told = self.world.tell_all((why, own_names(modules, aliases)), tuple[str, Names])
        for rank, (each, _) in enumerate(told):
            if each:
                return f"rank {rank}: {each}"
        mesh = self.coordinate.mesh
        found = clash(told[mesh.rank(stage, 0)][1] for stage in range(mesh.stages))
        return "" if found is None else f"{found}; name parameters over the whole model"

    def meet_neighbours(self) -> None:
        """Begin to send copies of the state to another pod, if that is wanted."""
        if self.keeper is not None and self.settings.neighbour:
            self.keeper.meet_neighbours(self.settings.deadline_seconds)

    def leave_traces(self, iterations: int) -> None:
        """Write the rest of the traces. ``iterations``: number of finished ones. Idempotent."""
        faults = [entry for end in self.links.ends for entry in end.faults.record()]
        if self._reduction_faults is not None:
            faults += self._reduction_faults.record()
        if self._device_faults is not None:
            faults += self._device_faults.record()
        for stage, trace in self.traces.items():
            trace.close(faults if stage == self.coordinate.stage else (), iterations)

    def close(self, *, goodbye: bool, iterations: int) -> None:
        """Release everything. ``goodbye``: the end is normal, and the neighbours are told so."""
        self.failures.stop()
        self.leave_traces(iterations)
        for own in self.stages.values():
            own.close()
        for end in self.links.ends:
            end.close(goodbye=goodbye)
        self.control.close()
        if self.agent is not None:
            self.agent.close()
        if self.keeper is not None:
            self.keeper.close(goodbye=goodbye)
        if self.links.departures is not None:
            self.links.departures.close()
        if self.links.staging is not None:
            self.links.staging.close(abandon=not goodbye)
        if self.links.engine is not None:
            self.poller.forget(self.links.engine.bell_fd)
            # After a failure there is no need to wait for acknowledgements.
            self.links.engine.close(5.0 if goodbye else 0.2)
        self.world.leave(clean=goodbye)
        if not any(end.receiving for end in self.links.ends):
            self.poller.close()
        self.failures.linger()
        # The other ranks have ended, and their host does not wait for long.
        self.listeners.close(failed=not goodbye, most=self.settings.deadline_seconds / 2)
