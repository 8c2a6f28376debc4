"""An ingest that changes the layout of a job in pods, for tests: its API server, its
reports and its launchers are played."""

from __future__ import annotations

import asyncio
from typing import Any

from operator_status import KEY, Shared, hear, known, tell

from pipemorph.control import JobController
from pipemorph.ingest import RestartHandler
from pipemorph.protocol import GenerationState
from pipemorph.spec.job_status import JobStatus, find_condition
from pipemorph.spec.layout import RankLayout
from pipemorph_operator import names
from pipemorph_operator.ingest.job_store import ClusterJobStore
from pipemorph_operator.ingest.layout_changer import LayoutChanger

EVEN, MOVED = RankLayout(layers=(4, 4, 4, 4)), RankLayout(layers=(5, 3, 4, 4))
FIRST = RankLayout()
LOSS = {"reason": "rank 1 exited with code 1", "at": 1.0, "rank": 1}
RESUMED = {"event": "resumed", "resumed": {"iteration": 0, "rung": "kept"}}
START = 2.0
"""Seconds that ranks took to start, by the job's clock."""
OPS = {"fused_backward": None, "activation_bytes": None, "offload_copy": None, "peak_memory": 0}


def an_api(**parallelism: Any) -> Shared:
    """API server of a job with four pods, each with a stage of four layers."""
    api = Shared()
    spec = api.job["spec"]
    spec["parallelism"] = {"stages": 4, "replicas": 1, "layers": 16, **parallelism}
    spec["schedule"] = {"microbatches": 12}
    spec["trainer"]["iterations"] = 5000
    spec["failurePolicy"] = {"maxRestarts": 5}
    spec["adaptation"] = {"relayout": True}
    return api


class Ingest:
    """Ingest that serves the job, by the second and iteration."""

    def __init__(self, api: Shared, done: int = 0) -> None:
        self.api, self.now, self.done = api, 1000.0, done
        self.store = ClusterJobStore(api, monotonic=lambda: self.now)  # type: ignore[arg-type]
        self.desk = RestartHandler(self.store)
        self.layouts = LayoutChanger(self.store.find_tracked_job, self.desk)

    async def begin(self) -> Ingest:
        await known(self.store, self.api.job)
        for pod in range(4):
            await tell(self.desk, pod, event="joined", launcher=f"of {pod}")
        generations = self.store.find_generations(*KEY)
        generations.progress.longest_start = START
        return self

    async def looks(self, *factors: float, times: int = 1, seconds: float = 1.0) -> None:
        """Process ``times`` reports, a second apart, of two iterations each, which take
        ``seconds``; a microbatch takes ``factors`` times as long as usual on each stage."""
        for _ in range(times):
            self.now += 1.0
            op = [0.01 * factor for factor in factors]
            names = ("forward", "backward_input", "backward_weight")
            stages = [dict.fromkeys(names, took) | OPS | {"stage": i} for i, took in enumerate(op)]
            hear(self.store, self.done, self.done + 1, stages=stages, seconds=seconds)
            self.done += 2
            self.layouts.process_report(*KEY)
            await asyncio.gather(*self.layouts.under_way.values())

    async def gone(self, generation: int = 0, **fields: Any) -> dict[str, Any]:
        """Report from all pods that their ranks are gone."""
        if isinstance(left_for := fields.get("left_for"), RankLayout):
            fields["left_for"] = left_for.model_dump()
        for pod in range(4):
            now = await tell(self.desk, pod, generation=generation, launcher=f"of {pod}", **fields)
        return now

    async def moves(self) -> None:
        """Layers move, and are on trial."""
        await self.looks(1, 1, 1, 1)
        await self.looks(1, 1.5, 1, 1, times=6)
        await self.gone(left_for=MOVED, finished=self.done, reached=self.done)
        assert self.controller.layers == MOVED.layers

    @property
    def controller(self) -> JobController:
        found = self.store.find_job(*KEY)
        assert isinstance(found, JobController)
        return found

    @property
    def requested_layout(self) -> RankLayout:
        """Layout that the ranks are to leave for, without the places that do not change."""
        generations = self.store.find_generations(*KEY)
        return RankLayout(layers=generations.layout_transition.requested_layout.layers)

    def forwards(self) -> list[float]:
        network = self.controller._job_state.stages.get_stage_times()
        assert network is not None
        return [round(each.forward, 6) for each in network]


def status(api: Shared) -> JobStatus:
    return JobStatus.model_validate(api.job["status"])


def stages_even(api: Shared) -> tuple[str, str]:
    found = find_condition(status(api), names.STAGES_EVEN)
    return found.reason, found.message


def layouts(answer: dict[str, Any]) -> tuple[int, RankLayout, RankLayout | None]:
    """The generation of an answer, its layout, and the one before if it is on trial."""
    state = GenerationState.model_validate(answer)
    return state.generation, state.layout, state.layout_before
