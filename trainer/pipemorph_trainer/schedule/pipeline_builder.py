"""Components of a pipeline: builds and connects them. The only module that uses all of them."""

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

from pipemorph.errors import InputError
from pipemorph.planning import Plan
from pipemorph.spec.layout import may_change_places
from pipemorph.spec.mesh import DATA_DIMENSIONS
from pipemorph_trainer.agent import AgentProcess
from pipemorph_trainer.agent.messages import ControlClient, NullControlClient
from pipemorph_trainer.backward.microbatch_state import LossFn
from pipemorph_trainer.checkpoint.memory.checkpointer import InMemoryCheckpointer
from pipemorph_trainer.checkpoint.memory.device_copy import DeviceCopier
from pipemorph_trainer.checkpoint.memory.rank_state import RankState
from pipemorph_trainer.checkpoint.memory.resume_point import ResumePoint
from pipemorph_trainer.checkpoint.user_state import OWN_NAMES, UserState
from pipemorph_trainer.checkpoint.value_names import NamesByStage, find_name_clash, list_own_names
from pipemorph_trainer.context import TrainerContext
from pipemorph_trainer.devices import choose_device
from pipemorph_trainer.executor.emulated_stage import EmulatedRunner
from pipemorph_trainer.executor.local_stage import LocalStage, find_stage_device
from pipemorph_trainer.executor.microbatch_costs import CostFunction
from pipemorph_trainer.executor.waiting import CollectiveWaiter, CurrentWait
from pipemorph_trainer.schedule.iteration import IterationRunner, RankContext
from pipemorph_trainer.schedule.microbatch_orderer import MicrobatchOrderer
from pipemorph_trainer.schedule.plan_store import PlanStore
from pipemorph_trainer.schedule.rank_preparation import (
    MakeOptimizer,
    MakeState,
    RankPreparation,
    StageOrBuilder,
    State,
    build_stages,
    prepare_rank,
    select_modules,
)
from pipemorph_trainer.startup import copy_first_replica, join_job, list_warnings
from pipemorph_trainer.sync.gradients import ReplicaSynchronizer
from pipemorph_trainer.sync.reduction import GradientReducer
from pipemorph_trainer.sync.ring_probe import RingProbe
from pipemorph_trainer.sync.scaler import GradScaler
from pipemorph_trainer.sync.tied_weights import TiedWeights
from pipemorph_trainer.telemetry.metrics import start_metrics
from pipemorph_trainer.telemetry.progress_file import write_note
from pipemorph_trainer.telemetry.reporter import TelemetryReporter, join_agent
from pipemorph_trainer.telemetry.run_queue import compute_crowding
from pipemorph_trainer.telemetry.trace import TraceWriter
from pipemorph_trainer.topology.accelerator import Accelerator, get_accelerator
from pipemorph_trainer.topology.failure_broadcast import FailureBroadcast
from pipemorph_trainer.topology.model_shard import find_move_obstacle
from pipemorph_trainer.trackers.listeners import IterationListeners, OnIteration, check_listeners
from pipemorph_trainer.transport.fault_injection import FaultTrace
from pipemorph_trainer.transport.link import LinkEnd
from pipemorph_trainer.transport.link_recorder import OpClock
from pipemorph_trainer.transport.message import SenderLoad
from pipemorph_trainer.transport.poller import Poller
from pipemorph_trainer.transport.rendezvous import LinkConfig, connect_neighbours

if TYPE_CHECKING:
    from pipemorph_trainer.checkpoint.disk import DiskCheckpointer

log = logging.getLogger("pipemorph.trainer")


@dataclass(frozen=True, kw_only=True)
class PipelineArguments:
    """Arguments of :class:`pipemorph_trainer.Pipeline` that no job replaces."""

    mesh: DeviceMesh | None
    plan: Plan | None
    split: str
    loss_fn: LossFn | None
    optimizer: torch.optim.Optimizer | MakeOptimizer | None
    control: ControlClient | None
    cost_fn: CostFunction | None
    tied: Sequence[Any] | None
    state: State | MakeState | None
    scaler: GradScaler | None
    on_iteration: OnIteration | Sequence[OnIteration] | None


class PipelineComponents:
    """Components of a pipeline. Each needs only components that were built before it.

    ``stages``, ``context``: those of :class:`pipemorph_trainer.Pipeline`; ``given``: the arguments
    that a job replaces, by name; ``arguments``: the rest. Collective. Raises the errors of the
    pipeline.
    """

    def __init__(
        self,
        stages: StageOrBuilder,
        context: TrainerContext,
        given: Mapping[str, Any],
        arguments: PipelineArguments,
    ) -> None:
        self.cost_fn = arguments.cost_fn
        mesh, loss_fn, scaler, control = (
            arguments.mesh, arguments.loss_fn, arguments.scaler, arguments.control
        )  # fmt: skip
        own, self.optimizer, self.state, failure, self._built = build_stages(
            stages, arguments.optimizer, arguments.state, context=context, given=given, mesh=mesh
        )
        listeners: Sequence[OnIteration] = ()
        try:
            listeners = check_listeners(arguments.on_iteration)
        except InputError as error:
            failure = failure or error
        # A rank without a stage joins the others on the device that its stage would probably use.
        self.device = (
            find_stage_device(own[0]) if failure is None else choose_device(context.local_rank)
        )
        accelerator = get_accelerator(self.device)
        if accelerator is not None:
            # Allocations that name no device then go to the stage's device.
            accelerator.enter_thread()
        directed = context.ingest_url is not None
        if control is not None:
            directed = not isinstance(control, NullControlClient)
        prepared, start = prepare_rank(
            own, context, given, arguments.plan, arguments.split, failure=failure, mesh=mesh,
            loss_fn=loss_fn, tied=arguments.tied, scaler=scaler, device=self.device,
            accelerator=accelerator, directed=directed,
        )  # fmt: skip
        try:
            self.world, starts = join_job(context, self.device, start, mesh)
        except InputError as error:
            raise error from failure
        assert prepared is not None, "join() raises on a rank that refuses"
        self.settings = prepared.settings
        self.coordinate = self.world.coordinate
        self.placements = frozenset(held.placement for each in starts for held in each.tensors)
        """Placements of the parameters of all stages."""

        self.waiting = CurrentWait(str(self.coordinate))
        self.wait_for = CollectiveWaiter(self.waiting, self.settings.deadline_seconds)
        several = self.world.get_group(DATA_DIMENSIONS) is not None
        faults = FaultTrace(
            self.settings.faults,
            self.settings.direct_duplex == "half",
            context.read_layout(self.coordinate.mesh),
        )
        self._device_faults = faults.make_device_faults(self.coordinate.rank)
        self._reduction_faults = faults.make_reduction_faults(self.coordinate)
        modules = select_modules(own, self.coordinate)
        if modules and several:
            self.waiting.begin_wait("the parameters and buffers of replica 0")
            copy_first_replica(self.world, starts, modules, self.wait_for)
            self.waiting.end_wait()
        self.tied: TiedWeights | None = None
        if start.ties:
            self.waiting.begin_wait("the tied weights of their first stage")
            self.tied = TiedWeights(start.ties, modules, self.world, self.wait_for)
            self.tied.copy_first_holder()
            self.waiting.end_wait()
        self.replicas: ReplicaSynchronizer | None = None
        if modules and several:
            # One object for all stages: their gradients are sent in one order, whatever the plans.
            whole, *others = modules.values()
            self.replicas = ReplicaSynchronizer(
                nn.ModuleList([whole, *others]) if others else whole, self.world, self.wait_for,
                accelerator=accelerator, faults=self._reduction_faults,
            )  # fmt: skip
        self.failures = FailureBroadcast(
            self.world, (p for module in modules.values() for p in module.parameters())
        )
        self.scaler = scaler
        if scaler is not None:
            scaler.attach_world(self.world, self.device, self.wait_for)
        if self.coordinate.rank == 0:
            for line in list_warnings(starts):
                log.warning(line)

        self.poller, op_clock = Poller(), OpClock()
        self.load = SenderLoad()
        self.agent: AgentProcess | None = None
        if control is None:
            control, self.agent = join_agent(context, self.world)
        self.control = control
        config = self._make_link_config(prepared, op_clock, faults)
        self.links = connect_neighbours(
            self.coordinate, config, master_addr=context.master_addr, groups=self.world.groups,
            control=self.world.control,
        )  # fmt: skip
        self.wait_for.find_lost_peer = self.links.describe_loss
        ends = self.links.ends
        self.plans = PlanStore(
            prepared.plan, self.coordinate, ends,
            no_offload={s: each.offload_refusal for s, each in prepared.memory.items()},
            no_recompute={s: each.recompute_refusal for s, each in prepared.memory.items()},
            rebalances=self.settings.rebalance,
        )  # fmt: skip
        for end in ends:
            if end.failover is not None:
                end.failover.on_broken = partial(self._handle_broken_route, end)
        self.stages = {
            number: LocalStage(
                each, self.coordinate.with_stage(number), loss_fn=loss_fn, split=prepared.split,
                memory=prepared.memory[number], microbatches=prepared.microbatches,
                device=self.device, accelerator=accelerator,
            )
            for number, each in zip(self.coordinate.held_stages, own, strict=True)
        }  # fmt: skip
        rails = self.links.engine.rails if self.links.engine is not None else None
        computes = accelerator is None and not any(s.emulated for s in self.stages.values())
        self.reporter = TelemetryReporter(
            self.coordinate, self.control, ends, rails=rails,
            crowding=compute_crowding(context.local_world_size) if computes else None,
            load=self.load, metrics=start_metrics(context, self.coordinate, prepared.plan),
        )  # fmt: skip
        folder = context.trace_dir
        self.traces = {
            number: TraceWriter(
                folder,
                self.coordinate.with_stage(number),
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
        """True if the host may request that ranks leave for another layout."""
        ring = None
        # A host that cannot move ranks between places passes no places.
        if moves and context.places is not None and may_change_places(self.coordinate.mesh):
            ring = RingProbe(self.world, self.wait_for, self._reduction_faults)
        self.listeners = IterationListeners.create_for_rank(
            listeners, context, version=prepared.plan.version
        )
        self.iterations = IterationRunner(
            RankContext(
                world=self.world, links=self.links, stages=self.stages,
                replicas=self.replicas, reducer=self._make_reducer(), ring=ring,
                tied=self.tied, plans=self.plans, control=self.control,
                reporter=self.reporter, traces=self.traces, listeners=self.listeners,
                failures=self.failures, poller=self.poller, op_clock=op_clock,
                wait=self.wait_for, deadline=self.settings.deadline_seconds,
                orderer=self._make_orderer(),
                inject_op_delay=None if self._device_faults is None
                else self._device_faults.hold_op,
            )
        )  # fmt: skip
        self._split = context.read_layer_split(self.coordinate.mesh.stages)
        self._generation, self._run = context.generation, context.run_name
        self._place = context.rank if context.place is None else context.place
        self._leave_note = partial(write_note, context.progress_dir, context.rank)
        self.extra = UserState(
            {**self.state, f"{OWN_NAMES}microbatches": self.iterations.position},
            self.coordinate,
            self.device,
        )
        self.checkpoints = self._open_checkpoints()
        self.memory_checkpointer: InMemoryCheckpointer | None = None
        if context.memory_dir is not None and self.settings.snapshot_iterations != 0:
            self.memory_checkpointer = self._open_memory_checkpointer(
                context.memory_dir, accelerator
            )

    def _make_orderer(self) -> MicrobatchOrderer | None:
        """Make the orderer of this column's microbatches; None if they run in order."""
        if self.settings.reorder == "bits":
            return None
        return MicrobatchOrderer(self.coordinate.mesh)

    def _make_reducer(self) -> GradientReducer | None:
        """Return the reducer that averages gradients over replicas; None without replicas."""
        if self.replicas is not None:
            return self.replicas.reducer
        runners = [own.runner for own in self.stages.values()]
        parameters = [
            parameter
            for runner in runners
            if isinstance(runner, EmulatedRunner)
            for parameter in runner.parameters
        ]
        if not parameters or self.world.get_group(DATA_DIMENSIONS) is None:
            return None
        return GradientReducer(
            [(parameter, DATA_DIMENSIONS) for parameter in parameters], self.world, self.wait_for,
            # One bucket for each parameter.
            most=1, faults=self._reduction_faults,
        )  # fmt: skip

    def _make_link_config(
        self, prepared: RankPreparation, op_clock: OpClock, faults: FaultTrace
    ) -> LinkConfig:
        settings, max_sends = self.settings, self.settings.direct_sends
        if max_sends is None and len(self.coordinate.held_stages) > 1:
            # The stages of a rank run in turns: a bound on one stage's sends could block another
            # stage that has not begun, and the ranks would wait for each other.
            max_sends = prepared.microbatches
            if settings.rebalance:
                max_sends *= settings.mesh.replicas
        return LinkConfig(
            secret=self.world.secret, device=self.device,
            deadline=settings.deadline_seconds, poller=self.poller, op_clock=op_clock,
            begin_wait=self.waiting.begin_wait, end_wait=self.waiting.end_wait,
            faults=faults,
            load=self.load,
            max_sends=max_sends,
            engine=prepared.engine,
        )  # fmt: skip

    def _open_memory_checkpointer(
        self, folder: Path, accelerator: Accelerator | None
    ) -> InMemoryCheckpointer:
        keepers = {stage: own.state_owner for stage, own in self.stages.items()}
        values = RankState(
            {s: each for s, each in keepers.items() if isinstance(each, nn.Module)},
            {s: each for s, each in keepers.items() if isinstance(each, EmulatedRunner)},
            self.optimizer,
            self.extra,
        )
        every = self.settings.snapshot_iterations
        if every is None:
            # The cost of copies on a device is unknown; only one is made, when ranks leave.
            every = 1 if accelerator is None or not self._leaves else 0
            late = DeviceCopier(accelerator) if accelerator is not None and self._leaves else None
        else:
            late = DeviceCopier(accelerator) if accelerator is not None else None
        return InMemoryCheckpointer(
            folder, values, self.world, self.placements, self.wait_for,
            generation=self._generation, every=every, device_copier=late, place=self._place,
            changes=self._resizes, split=self._split, report=self._leave_note,
        )  # fmt: skip

    def _open_checkpoints(self) -> DiskCheckpointer | None:
        keepers = {
            s: own.state_owner for s, own in self.stages.items() if own.state_owner is not None
        }
        if self.settings.checkpoint is None or not keepers:
            return None
        # The import takes longer than that of torch.
        from pipemorph_trainer.checkpoint.disk import DiskCheckpointer

        aliases = self.tied.aliases if self.tied is not None else {}
        return DiskCheckpointer(
            self.settings.checkpoint,
            self.world,
            keepers,
            self.optimizer,
            aliases=aliases,
            extra=self.extra,
            wait=self.wait_for,
            run=self._run,
        )

    def _handle_broken_route(self, end: LinkEnd, why: str) -> None:
        """Handle a broken direct route: its messages now need reserved slots of the engine."""
        self.plans.reserve_slots(self.plans.current_plan)
        self.reporter.record_route(end)
        self.reporter.publish(message=f"{self.coordinate}: {end}: the direct route broke: {why}")

    def resume_state(self) -> ResumePoint:
        """Resume from the state that an earlier generation has copied, else from the newest
        checkpoint, if requested."""
        wanted, why = self.settings.checkpoint, ""
        checkpoints = self.checkpoints if wanted is not None and wanted.resume else None
        if self.memory_checkpointer is None and self._generation > 0:
            why = "ranks copy no state in memory"
        elif self.memory_checkpointer is not None and self._generation > 0:
            found = self.memory_checkpointer.resume(
                checkpoints.find_newest_iteration() if checkpoints is not None else 0
            )
            if isinstance(found, ResumePoint):
                self.memory_checkpointer.set_first_iteration(found.iteration)
                return found
            why = found
        elif self.memory_checkpointer is not None:
            self.memory_checkpointer.remove_earlier_copies()
        found = ResumePoint(0, "beginning") if checkpoints is None else checkpoints.resume()
        if self.memory_checkpointer is not None:
            self.memory_checkpointer.set_first_iteration(found.iteration)
        return found._replace(why="; ".join(filter(None, (why, found.why))))

    def find_move_obstacle(self, layers: int) -> str:
        """Return why the stages of the model, with ``layers`` layers in all, cannot change; empty
        if they can. Collective over all ranks; the result is equal on all."""
        modules = {s: own.module for s, own in self.stages.items() if own.module is not None}
        why = find_move_obstacle(self._built, layers)
        if not why and self.memory_checkpointer is not None:
            why = self.memory_checkpointer.find_move_obstacle()
        aliases = self.tied.aliases if self.tied is not None else {}
        answers = self.world.gather_all(
            (why, list_own_names(modules, aliases)), tuple[str, NamesByStage]
        )
        for rank, (each, _) in enumerate(answers):
            if each:
                return f"rank {rank}: {each}"
        mesh = self.coordinate.mesh
        found = find_name_clash(
            answers[mesh.find_rank(stage, 0)][1] for stage in range(mesh.stages)
        )
        return "" if found is None else f"{found}; name parameters over the whole model"

    def connect_neighbours(self) -> None:
        """Start to send copies of the state to another pod, if configured."""
        if self.memory_checkpointer is not None and self.settings.neighbour:
            self.memory_checkpointer.connect_neighbours(self.settings.deadline_seconds)

    def finish_traces(self, iterations: int) -> None:
        """Write the rest of the traces. ``iterations``: the number of finished ones. Idempotent."""
        self.iterations.ops.publish()
        faults = [entry for end in self.links.ends for entry in end.faults.report_effects()]
        if self._reduction_faults is not None:
            faults += self._reduction_faults.report_effects()
        if self._device_faults is not None:
            faults += self._device_faults.report_effects()
        for stage, trace in self.traces.items():
            trace.close(faults if stage == self.coordinate.stage else (), iterations)

    def close(self, *, goodbye: bool, iterations: int) -> None:
        """Release everything. ``goodbye``: the end is normal, and the neighbours get a goodbye."""
        self.failures.stop()
        self.finish_traces(iterations)
        for own in self.stages.values():
            own.close()
        for end in self.links.ends:
            end.close(goodbye=goodbye)
        self.control.close()
        if self.agent is not None:
            self.agent.close()
        if self.memory_checkpointer is not None:
            self.memory_checkpointer.close(goodbye=goodbye)
        if self.links.send_timestamps is not None:
            self.links.send_timestamps.close()
        if self.links.staging is not None:
            self.links.staging.close(abandon=not goodbye)
        if self.links.engine is not None:
            self.poller.stop_watching(self.links.engine.notifier_fd)
            # After a failure there is no need to wait for acknowledgements.
            self.links.engine.close(5.0 if goodbye else 0.2)
        self.world.destroy_groups(clean=goodbye)
        if not any(end.receiving for end in self.links.ends):
            self.poller.close()
        self.failures.await_readers()
        # The other ranks have ended, and their host waits only a short time.
        self.listeners.close(failed=not goodbye, most=self.settings.deadline_seconds / 2)
