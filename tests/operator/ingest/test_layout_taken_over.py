"""Takeover from an ingest that was killed as it moved layers, at any write. No cluster."""

from __future__ import annotations

import asyncio
import logging
import time
from itertools import permutations
from typing import Any

import pytest
from moving_job import EVEN, FIRST, LOSS, MOVED, RESUMED, Ingest, an_api, layouts, status
from operator_status import KEY, hear, known, tell

from pipemorph.control.snapshot import Snapshot
from pipemorph.ingest import RestartHandler, restart_handler
from pipemorph_operator.kube.client import KubeApiError


class Pods:
    """The launchers of the job's pods, which have had their ranks leave for other layers. Whatever
    they begin must be the same everywhere."""

    def __init__(self, ingest: Ingest) -> None:
        self.known = dict.fromkeys(range(4), 0)
        """Generation that each pod has begun."""
        self.began: dict[int, tuple[Any, Any]] = {}
        """The layers of each, and those before."""
        self._departed = {
            "left_for": MOVED.model_dump(),
            "finished": ingest.done,
            "reached": ingest.done,
        }

    async def tell(self, desk: RestartHandler, pod: int) -> None:
        """Request what to begin, as a launcher that has no ranks."""
        if self.known[pod] > 0:
            return
        answer = await tell(desk, pod, launcher=f"of {pod}", **self._departed)
        if answer["generation"] > 0 and not answer["over"]:
            self.known[pod] = answer["generation"]
            what = layouts(answer)[1:]
            assert self.began.setdefault(answer["generation"], what) == what


EACH_FIRST = [(0, 1, 2, 3), (1, 3, 0, 2), (2, 0, 3, 1), (3, 2, 1, 0)]
ORDERS = [
    pytest.param(order, marks=() if order in EACH_FIRST else pytest.mark.full)
    for order in permutations(range(4))
]


@pytest.mark.parametrize(
    "dies", ["before the write", "refused", "after the write", "after telling 1", "telling 3"]
)
@pytest.mark.parametrize("order", ORDERS, ids=str)
async def test_an_ingest_that_dies_between_writing_and_telling_of_layers_costs_nothing(
    dies: str, order: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Pods have the answer of either ingest, and request it of the next one in any order: all begin
    the same generation with the same layers, and no failure is counted."""
    monkeypatch.setattr(restart_handler, "PERSIST_SECONDS", 0.005)
    api = an_api()
    first = await Ingest(api).begin()
    await first.looks(1, 1, 1, 1)
    await first.looks(1, 1.5, 1, 1, times=6)
    assert first.requested_layout == MOVED
    pods, apply = Pods(first), api.apply

    async def stuck(*args: Any, **kwargs: Any) -> Any:
        if dies == "refused":
            raise KubeApiError(503, "ServiceUnavailable", "try again")
        if dies == "after the write":
            await apply(*args, **kwargs)
        await asyncio.Event().wait()

    if "telling" not in dies:
        api.apply = stuck  # type: ignore[method-assign]
    again = int(dies[-1]) if "telling" in dies else 4
    for pod in (*order, *order[:again]):
        await pods.tell(first.desk, pod)
    generation = first.store.find_generations(*KEY)
    assert generation is not None and generation.layout == MOVED
    assert (set(pods.known.values()) == {0}) is ("telling" not in dies)
    for task in asyncio.all_tasks() - {asyncio.current_task()}:
        task.cancel()
    api.apply = apply  # type: ignore[method-assign]

    second = Ingest(api, first.done)
    await known(second.store, api.job)
    for pod in (*order, *order):
        await pods.tell(second.desk, pod)
    assert set(pods.known.values()) == {1} and pods.began == {1: (MOVED, FIRST)}
    found = status(api).recoveries
    assert found is not None and (found.count, found.counted) == (0, 0)
    assert (found.generation, found.layout, found.layout_before) == (1, MOVED, FIRST)


@pytest.mark.parametrize("refused", [True, False])
async def test_an_ingest_that_takes_over_does_not_try_again_what_was_refused(refused: bool) -> None:
    """The ingest is killed after the ranks have gone back, the next one finds the same stage slow
    again. Without the refused split in status it would have ranks leave for it."""
    api = an_api()
    first = await Ingest(api).begin()
    await first.moves()
    await first.gone(1, loss=LOSS, finished=first.done)
    found = status(api).recoveries
    assert found is not None and [each.layers for each in found.layouts_refused] == [MOVED.layers]
    if not refused:
        api.job["status"]["recoveries"]["layoutsRefused"] = []
    second = Ingest(api, first.done)
    second.now += 10_000.0
    await known(second.store, api.job)
    await second.looks(1, 1, 1, 1, times=3)
    await second.looks(1, 1.5, 1, 1, times=6)
    assert (second.requested_layout == MOVED) is not refused


async def test_an_ingest_that_takes_over_expects_the_new_parts_and_decides_on() -> None:
    api = an_api()
    first = await Ingest(api).begin()
    await first.moves()
    await tell(first.desk, 0, generation=1, launcher="of 0", **RESUMED)
    await first.looks(1.25, 1.125, 1, 1, times=2)
    await first.store.persist_generations(*KEY)
    other = Ingest(api, first.done)
    await known(other.store, api.job)
    assert other.controller.layers == MOVED.layers
    # The overhead of stages is in the snapshot.
    hear(other.store, snapshot="held")
    other.controller.adopt_plan(
        0, Snapshot.parse_snapshot(first.controller.take_snapshot()), time.time()
    )
    # The device is well again.
    await other.looks(1.25, 0.75, 1, 1, times=6)
    assert other.requested_layout == EVEN
    answer = await other.gone(1, left_for=EVEN, finished=other.done, reached=other.done)
    assert layouts(answer) == (2, FIRST, MOVED)
    assert other.controller.layers == ()


async def test_an_ingest_that_takes_over_on_trial_goes_back(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO, logger="pipemorph.ingest")
    api = an_api()
    first = await Ingest(api).begin()
    await first.moves()
    other = Ingest(api, first.done)
    await known(other.store, api.job)
    assert other.controller.layers == MOVED.layers
    answer = await other.gone(1, loss=LOSS, finished=other.done)
    assert layouts(answer) == (2, FIRST, None)
    assert other.controller.layers == ()
    await other.looks(1, 1.5, 1, 1, times=6)
    # No proposal is one that generations would refuse.
    assert other.requested_layout != MOVED and "layout not changed" not in caplog.text
