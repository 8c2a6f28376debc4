"""Stages that are called slow, against their peers and against their own past."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest

from pipemorph.detection.event_log import EventLog
from pipemorph.detection.stage_monitor import StageProfiles
from pipemorph.detection.straggler_monitor import (
    CONFIRM_ITERATIONS,
    CONFIRM_SECONDS,
    FEWEST_PROFILES,
    MEDIAN_PROFILES,
    StragglerMonitor,
)
from pipemorph.protocol import DeviceClockRate, StageProfile, StragglersView
from pipemorph.spec.mesh import MeshShape

CONFIRM = CONFIRM_ITERATIONS
assert CONFIRM >= CONFIRM_SECONDS, "an iteration takes a second here"


class Job:
    """Stages 0 … 3 of 10, 11, 12 and 13 ms of F, B and W together, with 3% of noise."""

    def __init__(self, *, crowding: float = 0.0, **sizes: int) -> None:
        self.crowding = crowding
        self.mesh = MeshShape(4, **sizes)
        self.events = EventLog()
        self.book = StragglerMonitor(4, self.mesh, self.events)
        self.ranks = {
            (stage, column): StageProfiles(stage, column)
            for stage in range(4)
            for column in range(self.mesh.columns)
        }
        self.iteration = 0
        self.rng = random.Random(7)

    def run(
        self,
        iterations: int,
        slow: dict[tuple[int, int], float] | None = None,
        *,
        batch: float = 1.0,
        clocks: dict[tuple[int, int], DeviceClockRate] | None = None,
        work: Sequence[float] = (),
        costs: bool = True,
        work_error: float = 0.0,
    ) -> StragglersView:
        """``slow``: factors by (stage, column). ``batch``: a factor for all. ``work``: of each
        column, with 20% of spread over iterations; ``costs``: the script gives it; ``work_error``:
        of the means, by the microbatches."""
        for _ in range(iterations):
            drawn = [each * self.rng.uniform(0.65, 1.35) for each in work]
            for stage in range(4):
                for column in range(self.mesh.columns):
                    took = (10 + stage) * batch * self.rng.uniform(0.97, 1.03)
                    took *= (slow or {}).get((stage, column), 1.0) / 1e3
                    took *= drawn[column] if drawn else 1.0
                    profile = StageProfile(
                        stage=stage, replica=column, split="deferred", peak_memory=0,
                        crowding=self.crowding,
                        forward=took / 3, backward_input=took / 3, backward_weight=took / 3,
                        clock=(clocks or {}).get((stage, column)),
                        cost=7e3 * drawn[column] if drawn and costs else None,
                        work_error=work_error,
                    )  # fmt: skip
                    rank = self.ranks[stage, column]
                    rank.add_profile(profile)
                    state = rank.build_state()
                    assert state is not None
                    self.book.update_state(state)
            self.book.compare_paces(1000.0 + self.iteration, self.iteration)
            self.iteration += 1
        return self.book.build_view()

    @property
    def texts(self) -> list[str]:
        return [event.text for event in self.events.get_newest()]


def test_stages_of_unequal_size_are_not_slow() -> None:
    job = Job(replicas=3)
    assert not job.run(FEWEST_PROFILES - 1).known
    found = job.run(500)
    assert found.known
    assert (found.count, found.slowest, job.texts) == (0, (), [])


@pytest.mark.parametrize("replicas", [2, 3, 8])
def test_one_rank_is_slower_than_its_peers_from_the_start(replicas: int) -> None:
    job = Job(replicas=replicas)
    found = job.run(FEWEST_PROFILES + CONFIRM, slow={(2, 1): 1.4})
    (straggler,) = found.slowest
    assert (straggler.stage, straggler.column) == (2, 1)
    assert straggler.ratio == pytest.approx(1.4, rel=0.08)
    assert job.texts == ["stage 2 of replica 1 computes 1.4 times as long as its peers"]
    split = found.suggest_split(16)
    assert split is not None, "all replicas wait for the slowest"
    # Stages of 4 layers: 16.8 ms with 3 of them are 12.6, and 10 ms with 5 are 12.5; 13 stay.
    assert split.layers == (5, 4, 3, 4)
    assert split.gain == pytest.approx(1 - 13 / 16.8, abs=0.05)
    assert found.suggest_split(None) is None
    assert job.run(MEDIAN_PROFILES + CONFIRM).count == 0
    assert job.texts[-1] == "stage 2 of replica 1 computes as fast as it should again"


def test_a_column_with_more_work_is_not_slow() -> None:
    """A column is not slow if the script gives costs. A slow rank is still found, at any work."""
    work = (1.0, 2.0, 1.0)
    job = Job(replicas=3)
    found = job.run(200, work=work)
    assert found.known
    assert (found.count, job.texts) == (0, [])
    found = job.run(FEWEST_PROFILES + CONFIRM, slow={(2, 0): 1.5}, work=work)
    assert job.texts == ["stage 2 of replica 0 computes 1.5 times as long as its peers"]
    assert found.slowest[0].ratio == pytest.approx(1.5, rel=0.08)
    without = Job(replicas=3)
    assert without.run(200, work=work, costs=False).count == 4, "all stages of replica 1"


def test_columns_may_differ_by_what_the_spread_of_work_explains() -> None:
    """Batches of eight microbatches with a standard deviation of 0.57, without costs."""
    found = {}
    for error in (0.0, 0.2):
        job = Job(replicas=3)
        job.run(200, work=(1.0, 1.0, 1.0), costs=False, work_error=error)
        found[error] = len(job.texts)
    assert found[0.0] > 20
    assert found[0.2] == 0
    slow = job.run(
        3 * MEDIAN_PROFILES, slow={(2, 0): 2.5}, work=(1, 1, 1), costs=False, work_error=0.2
    )
    assert {(each.stage, each.column) for each in slow.slowest} >= {(2, 0)}
    assert all(each.stage == 2 for each in slow.slowest)


def test_ops_that_differ_in_work_are_not_inflated() -> None:
    for error in (0.0, 0.2):
        profiles = StageProfiles(0, 0)
        for took in (1.0, 0.8, 1.2):
            profiles.add_profile(
                StageProfile(
                    stage=0,
                    split="deferred",
                    peak_memory=0,
                    forward=took,
                    backward_input=took,
                    backward_weight=took,
                    work_error=error,
                )
            )
        assert profiles.ops_inflated is (error == 0.0)


def test_op_times_are_medians_of_times_per_cost() -> None:
    """Op times have the spread of the stage, and not that of the batch."""
    costs = [1000.0, 4000.0, 2000.0, 8000.0, 1500.0, 3000.0, 2500.0]
    with_costs, without = StageProfiles(0, 0), StageProfiles(0, 0)
    for cost in costs:
        times = {"forward": 2e-6 * cost, "backward_input": 3e-6 * cost, "backward_weight": 0.0}
        profile = StageProfile(
            stage=0, split="fused", peak_memory=0, fused_backward=2.9e-6 * cost, **times
        )
        without.add_profile(profile)
        with_costs.add_profile(profile.model_copy(update={"cost": cost}))
        assert not with_costs.ops_inflated
    assert without.ops_inflated, "as before: the newest took 2.5 times as long as the least"
    state = with_costs.build_state()
    assert state is not None
    assert state.cost == 2500.0
    assert state.forward == pytest.approx(2e-6 * 2500)
    assert state.fused_backward == pytest.approx(2.9e-6 * 2500)
    assert state.recent == pytest.approx(5e-6 * 2500)
    assert with_costs.get_longest_op() == pytest.approx(3e-6 * 2500)
    with_costs.add_profile(profile)
    state = with_costs.build_state()
    assert state is not None
    assert (state.profiles, state.cost) == (1, None), "no unit in common with the ones before"


@pytest.mark.parametrize("columns", [1, 2])
def test_a_stage_is_slower_than_before_in_all_columns(columns: int) -> None:
    """Ranks of a tensor group wait for each other inside ops: all of them take as long."""
    job = Job(tensor=columns)
    job.run(30)
    found = job.run(MEDIAN_PROFILES, slow={(1, column): 1.5 for column in range(columns)})
    (straggler,) = found.slowest
    assert (straggler.stage, straggler.column) == (1, None)
    assert job.texts == ["stage 1 computes 1.5 times as long as before"]
    split = found.suggest_split(16)
    # Stages of 4 layers: 16.5 ms with 3 of them are 12.4, and 10 ms with 5 are 12.5; 13 stay.
    assert split.layers == (5, 3, 4, 4)
    assert split.gain == pytest.approx(1 - 13 / 16.5, abs=0.05)
    assert job.run(MEDIAN_PROFILES + CONFIRM).count == 0


def test_a_stage_is_named_two_iterations_after_it_became_slow_and_as_soon_as_it_is_well() -> None:
    job = Job()
    job.run(30)
    slow = {(1, 0): 1.6}
    assert [job.run(1, slow=slow).count for _ in range(3)] == [0, 0, 1]
    job.run(10, slow=slow)
    assert [job.run(1).count for _ in range(3)] == [1, 1, 0]


def test_where_ranks_share_processors_a_run_of_pauses_names_no_stage() -> None:
    job = Job(crowding=2.0)
    job.run(30)
    assert job.run(4, slow={(1, 0): 3.0}).count == 0
    job.run(10)
    assert job.texts == []


def test_larger_batches_make_no_stage_slow_and_hide_none() -> None:
    job = Job()
    job.run(30)
    assert job.run(30, batch=1.8).count == 0
    assert job.texts == []
    (straggler,) = job.run(MEDIAN_PROFILES, batch=1.8, slow={(3, 0): 1.5}).slowest
    assert straggler.stage == 3


def test_pauses_make_no_stage_slow() -> None:
    job = Job(replicas=2)
    for _ in range(40):
        job.run(1, slow={(job.rng.randrange(4), job.rng.randrange(2)): 20.0})
        job.run(3)
    assert job.texts == []


def test_a_straggler_stays_one_until_it_is_clearly_faster() -> None:
    job = Job(replicas=3)
    job.run(20, slow={(0, 2): 1.3})
    for factor in (1.15, 1.25, 1.15, 1.25):
        job.run(20, slow={(0, 2): factor})
    assert len(job.texts) == 1
    assert job.run(20, slow={(0, 2): 1.05}).count == 0


HELD = DeviceClockRate(mhz=1005, most_mhz=1980, held_by=("power cap",))
FULL = DeviceClockRate(mhz=1935, most_mhz=1980)


def test_a_clock_that_is_held_down_is_named_with_its_reason() -> None:
    job = Job(replicas=2)
    clocks = {(stage, column): FULL for stage in range(4) for column in range(2)}
    found = job.run(20, {(2, 1): 1.9}, clocks=clocks | {(2, 1): HELD})
    text = found.slowest[0].format_text(job.mesh)
    assert text.startswith("stage 2 of replica 1 computes 1.")
    assert text.endswith(" times as long as its peers: its clock is 1.0 of 2.0 GHz (power cap)")
    assert found.slowest[0].clock == HELD
    # No longer reported, no longer said.
    assert job.run(1, {(2, 1): 1.9}).slowest[0].clock is None


def test_of_a_stage_that_is_slow_in_all_columns_the_lowest_clock_is_named() -> None:
    job = Job(replicas=2)
    job.run(20)
    lower = DeviceClockRate(mhz=1200, most_mhz=1980)
    clocks = {(1, 0): FULL, (1, 1): lower}
    found = job.run(20, {(1, 0): 1.6, (1, 1): 1.6}, clocks=clocks)
    assert (found.slowest[0].column, found.slowest[0].clock) == (None, lower)
    assert found.slowest[0].format_text(job.mesh).endswith("before: its clock is 1.2 of 2.0 GHz")


def test_a_full_clock_explains_nothing() -> None:
    job = Job(replicas=2)
    clocks = {(2, 1): FULL}
    assert "clock" not in job.run(20, {(2, 1): 1.9}, clocks=clocks).slowest[0].format_text(job.mesh)
