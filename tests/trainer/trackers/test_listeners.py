"""Listeners are called during training: in order, with what rank 0 knows, and at no risk for it."""

from __future__ import annotations

import logging
import threading
from typing import Any

import pytest
from agents import plan

from pipemorph.errors import InputError
from pipemorph.protocol import IterationSample
from pipemorph.spec.mesh import MeshShape
from pipemorph_trainer.agent.rank_plan import RankPlan, split_plan
from pipemorph_trainer.context import TrainerContext
from pipemorph_trainer.trackers import FinishedIteration, PlanChange, listeners
from pipemorph_trainer.trackers.kubeflow import AUTHORITY, TOKEN, URL
from pipemorph_trainer.trackers.listeners import IterationListeners, check_listeners


def sample(index: int, version: int = 0) -> IterationSample:
    return IterationSample(
        index=index, seconds=0.5, loss=1.0, plan_version=version, bubble_fraction=0.25
    )


def rank_plan(version: int, **fields: Any) -> RankPlan:
    return split_plan(plan(version), MeshShape(2))[0].model_copy(update=fields)


def context(rank: int = 0) -> TrainerContext:
    return TrainerContext(rank, 2, rank, "127.0.0.1", 1)


def test_each_iteration_in_order_in_a_thread_of_its_own() -> None:
    received: list[FinishedIteration] = []
    threads = set()

    def hear(finished: FinishedIteration) -> None:
        threads.add(threading.current_thread())
        received.append(finished)

    dispatcher = IterationListeners.create_for_rank([hear], context(), version=0, environ={})
    for index in range(5):
        dispatcher.publish_iteration(sample(index))
    dispatcher.close()
    assert received == [
        FinishedIteration(index=i, seconds=0.5, loss=1.0, bubble_fraction=0.25, plan_version=0)
        for i in range(5)
    ]
    assert len(threads) == 1 and threading.current_thread() not in threads
    assert not threads.pop().is_alive()


def test_a_change_of_plan_comes_once_with_what_is_known_of_it() -> None:
    received: list[FinishedIteration] = []
    dispatcher = IterationListeners([received.append], version=3, total=9)
    for each in (rank_plan(4, reason="never ran"), rank_plan(5, reason="late", promised=0.25)):
        dispatcher.record_plan(each)
    # 2: of ranks before these, which had not reported it.
    for index, version in enumerate((3, 2, 5, 5, 6)):
        dispatcher.publish_iteration(sample(index, version))
    dispatcher.close()
    changes = [None, None, PlanChange(3, 5, "late", 0.25), None, PlanChange(5, 6)]
    assert [each.change for each in received] == changes
    assert {each.total for each in received} == {9}


def test_an_error_is_one_warning_and_ends_nothing(caplog: pytest.LogCaptureFixture) -> None:
    received: list[int] = []

    def broken(finished: FinishedIteration) -> None:
        if finished.index == 3:
            raise SystemExit(1)
        raise OSError("the disk\nis full")

    dispatcher = IterationListeners([broken, lambda finished: received.append(finished.index)])
    with caplog.at_level(logging.WARNING, logger="pipemorph.trackers"):
        for index in range(4):
            dispatcher.publish_iteration(sample(index))
        dispatcher.close()
    assert received == [0, 1, 2, 3]
    first, last = [record.getMessage() for record in caplog.records]
    assert "broken failed for iteration 0: OSError: the disk" in first
    assert "broken failed for 4 iterations" in last


def test_a_listener_that_hangs_neither_holds_up_training_nor_its_end(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(listeners, "MOST_WAITING", 4)
    monkeypatch.setattr(listeners, "CLOSE_SECONDS", 0.05)
    received: list[int] = []
    goes_on, began = threading.Event(), threading.Event()

    def hang(finished: FinishedIteration) -> None:
        began.set()
        assert goes_on.wait(60)
        received.append(finished.index)

    dispatcher = IterationListeners([hang])
    dispatcher.publish_iteration(sample(0))
    assert began.wait(60)
    (thread,) = [each for each in threading.enumerate() if each.name == "on_iteration"]
    with caplog.at_level(logging.WARNING, logger="pipemorph.trackers"):
        for index in range(1, 9):
            dispatcher.publish_iteration(sample(index, version=int(index > 3)))
        dispatcher.close()
    said = [record.getMessage() for record in caplog.records]
    assert "4 iterations behind; from iteration 5 on" in said[0]
    assert "has not returned within 0.05 s" in said[1]
    assert "4 iterations were skipped" in said[2]
    goes_on.set()
    thread.join(60)
    assert received == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("given", [3, [len, 3], "abc"])
def test_what_cannot_be_called_is_refused(given: Any) -> None:
    with pytest.raises(InputError, match=r"on_iteration is .*; expected a function of one"):
        check_listeners(given)


def test_one_several_or_none_may_be_given() -> None:
    assert (check_listeners(None), check_listeners(len), check_listeners([len, abs])) == (
        (),
        (len,),
        (len, abs),
    )


def test_kubeflow_gets_reports_if_it_has_set_its_variables() -> None:
    environ = {URL: "https://127.0.0.1:1/x", AUTHORITY: "/no/ca", TOKEN: "/no/token"}
    for rank, listens in ((0, True), (1, False)):
        found = IterationListeners.create_for_rank([], context(rank), version=0, environ=environ)
        assert bool(found._listeners) is listens
        if not listens:  # Without listeners nothing is queued or waited for.
            found.publish_iteration(sample(0))
            found.close()
