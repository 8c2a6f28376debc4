"""The network below all jobs, from their links to what the ingest publishes. No cluster."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from operator_objects import body

from pipemorph.api.running import Running
from pipemorph.api.sections.parallelism import Parallelism
from pipemorph.api.spec import JobSpec
from pipemorph.control import Health, LinkHealth
from pipemorph.fabric.findings import nodes
from pipemorph.fabric.memory import HALF_LIFE
from pipemorph.wire import FabricPair, FabricView
from pipemorph_operator.cluster.client import ApiRefused
from pipemorph_operator.cluster.fabric_map import Place, findings_of
from pipemorph_operator.ingest import fabric
from pipemorph_operator.ingest.fabric import SAVE_SECONDS, FabricWatch, Part
from pipemorph_operator.metrics import FABRIC_SUSPECTS

PLACE = Place("system", "fabric")
Object = dict[str, Any]


class Api:
    """The API server: pods by job, nodes' labels, and the ConfigMap."""

    def __init__(self) -> None:
        self.pods: dict[str, list[Object]] = {}
        self.racks: dict[str, str] = {}
        self.maps: dict[str, Object] = {}
        self.writes = self.lists = 0
        self.forbidden = ""

    @property
    def saved(self) -> Object | None:
        return self.maps.get("fabric")

    @saved.setter
    def saved(self, body: Object) -> None:
        self.maps["fabric"] = body

    async def get(self, url: str) -> Object | None:
        place, _, name = url.rpartition("/")
        assert place == "/api/v1/namespaces/system/configmaps"
        return self.maps.get(name)

    async def list(self, url: str, *, labels: str) -> list[Object]:
        self.lists += 1
        uid = labels.partition(",")[0].partition("=")[2]
        if uid == self.forbidden:
            raise ApiRefused(403, "Forbidden", "not in this namespace")
        return self.pods[uid]

    async def metadata(self, url: str) -> AsyncIterator[Object]:
        assert url == "/api/v1/nodes"
        for name, rack in self.racks.items():
            yield {"name": name, "labels": {"rack": rack}}
        yield {"name": "bare"}

    async def apply(self, obj: Object, owner: str) -> Object:
        assert owner == "pipemorph-ingest"
        self.writes += 1
        self.maps[obj["metadata"]["name"]] = obj
        return obj


class Job:
    """A tracked job with one rank a node. ``slow``: its slow links, (link, column)."""

    def __init__(self, uid: str, placed: list[str], api: Api, **spec: Any) -> None:
        stages = spec.pop("stages", len(placed))
        made = body(stages=stages, **spec)["spec"]
        made["parallelism"]["replicas"] = len(placed) // stages
        self.uid, self.job_uid, self.namespace = uid, f"{uid}-job", "team"
        self.key = (self.namespace, uid)
        self.spec, self.attempt = JobSpec.model_validate(made), 0
        self.slow: set[tuple[int, int]] = set()
        self.unknown: set[int] = set()
        self.sick: tuple[Any, ...] = ()
        self.controller, self.running = self, Running(self.spec.parallelism)
        self.checked: FabricView | None = None
        self.reports = SimpleNamespace(reported_at=1.0)
        api.pods[uid] = [pod(i, node, self.job_uid) for i, node in enumerate(placed)]

    def links(self, now: float) -> Iterator[LinkHealth]:
        slow = dict(self.slow)
        for link in range(self.spec.parallelism.stages - 1):
            health = Health.SLOW if link in slow else Health.HEALTHY
            if link in self.unknown:
                health = Health.UNKNOWN
            yield LinkHealth(link, health, replica=slow.get(link, 0))

    def rails(self, now: float) -> Any:
        return SimpleNamespace(sick=self.sick)

    def fabric(self) -> FabricView | None:
        return self.checked


def pod(index: int, node: str, job_uid: str) -> Object:
    return {
        "metadata": {
            "name": f"p{index}",
            "annotations": {"batch.kubernetes.io/job-completion-index": str(index)},
            "ownerReferences": [{"controller": True, "kind": "Job", "uid": job_uid}],
        },
        "spec": {"nodeName": node},
    }


class World:
    def __init__(self, rack_label: str = "") -> None:
        self.api, self.jobs, self.now = Api(), [], 1000.0  # type: ignore[var-annotated]
        self.rack_label = rack_label
        self.watch = self.started()

    def started(self) -> FabricWatch:
        api: Any = self.api
        return FabricWatch(api, lambda: self.jobs, PLACE, self.rack_label, clock=lambda: self.now)

    def job(self, uid: str, placed: list[str], **spec: Any) -> Job:
        self.jobs.append(Job(uid, placed, self.api, **spec))
        return self.jobs[-1]  # type: ignore[no-any-return]

    def look(self, seconds: float = 30.0) -> None:
        self.now += seconds
        asyncio.run(self.watch.look())

    def found(self, *, accused: bool = True) -> list[str]:
        return list(nodes(findings_of(self.api.saved or {}), accused=accused))

    def sick_node(self) -> None:
        """Two jobs in turn with slow links at node ``bad``."""
        self.job("one", ["a", "bad", "b", "c"]).slow = {(0, 0), (1, 0)}
        self.job("two", ["d", "e", "f", "bad"]).slow = {(2, 0)}


def test_links_of_several_jobs_accuse_the_node_they_share() -> None:
    world = World()
    world.job("one", ["a", "bad", "b", "c"]).slow = {(0, 0), (1, 0)}
    world.look()
    assert (world.found(), world.found(accused=False)) == ([], ["bad"]), "one job: only suspected"
    world.job("two", ["d", "e", "f", "bad"]).slow = {(2, 0)}
    world.look()
    assert world.found() == ["bad"]
    assert FABRIC_SUSPECTS.labels(kind="node", name="bad")._value.get() > 0.9
    assert world.api.lists == 2, "the pods of an attempt are looked up once"
    (told,) = json.loads(world.api.saved["data"]["findings"])  # type: ignore[index]
    assert (told["kind"], told["name"], told["slow"], told["accused"]) == ("node", "bad", 3, True)


def test_nothing_is_written_of_a_network_that_is_well() -> None:
    world = World()
    world.job("one", ["a", "b", "c", "d"])
    for _ in range(50):
        world.look()
    assert world.api.writes == 0


def test_findings_are_written_at_once_and_the_memory_now_and_then() -> None:
    world = World()
    world.sick_node()
    world.look()
    assert world.api.writes == 1
    world.look(SAVE_SECONDS - 60)
    assert world.api.writes == 1
    world.look(61)
    assert world.api.writes == 2


def test_a_restart_remembers_jobs_that_have_ended() -> None:
    world = World()
    world.job("one", ["a", "bad", "b", "c"]).slow = {(0, 0), (1, 0)}
    world.look()
    world.jobs.clear()
    world.watch = world.started()
    world.job("two", ["d", "e", "f", "bad"]).slow = {(2, 0)}
    world.look()
    assert world.found() == ["bad"]
    world.watch = world.started()
    world.jobs.clear()
    world.look(300)
    assert world.found() == ["bad"], "as told before, without any job"


def test_a_node_is_well_again_after_its_links_were_for_long_enough() -> None:
    world = World()
    world.sick_node()
    world.look()
    assert world.found() == ["bad"]
    for job in world.jobs:
        job.slow = set()
    world.look()
    assert world.found() == ["bad"], "not at the first healthy report"
    for _ in range(25):
        world.look()
    assert (world.found(), world.found(accused=False)) == ([], [])


def test_a_link_s_own_faults_unknown_links_and_pods_of_others_do_not_count() -> None:
    world = World()
    world.sick_node()
    first, second = world.jobs
    first.unknown = {0, 1}
    fault = {"link": 2, "delayMs": 5, "fromIteration": 0}
    world.jobs[1] = Job("two", ["d", "e", "f", "bad"], world.api, faults=[fault])
    world.jobs[1].slow = second.slow
    forged = world.job("three", ["g", "bad", "h", "i"])
    forged.slow = {(0, 0), (1, 0)}
    forged.job_uid = "its pods were made by somebody else"
    world.look()
    assert (world.found(accused=False), len(world.watch.memory)) == ([], 3)


def test_of_a_slow_link_only_the_slowest_column_counts() -> None:
    world = World()
    job = world.job("one", ["a", "b", "c", "d"], stages=2)
    job.slow = {(0, 1)}
    world.look()
    evidence = {
        (e.ends[0].node, e.ends[1].node): e.slow for e in world.watch.memory.evidence(world.now)
    }
    assert evidence == {("b", "d"): 1.0}, "the ranks of replica 1"


def test_a_new_attempt_is_placed_anew_and_one_that_waits_not_yet() -> None:
    world = World()
    job = world.job("one", ["a", "b"])
    del world.api.pods["one"][1]["spec"]["nodeName"]
    world.look()
    assert len(world.watch.memory) == 0
    world.api.pods["one"][1]["spec"]["nodeName"] = "b"
    world.look()
    assert len(world.watch.memory) == 1
    job.attempt = 1
    world.api.pods["one"] = [pod(0, "x", job.job_uid), pod(1, "y", job.job_uid)]
    world.look()
    assert len(world.watch.memory) == 2
    job.reports.reported_at = None
    job.attempt = 2
    world.look()
    assert world.api.lists == 3


def test_a_spare_that_takes_a_place_brings_its_node() -> None:
    world = World()
    cut = {"stages": 3, "replicas": 1, "spares": 1}
    job = world.job("a", ["n0", "n1", "n2", "n3"], stages=3, failurePolicy={"maxRestarts": 1})
    job.spec = job.spec.model_copy(update={"parallelism": Parallelism.model_validate(cut)})
    job.running = Running(job.spec.parallelism)
    world.look()
    assert dict(world.watch._placed["a"].node_of_rank) == {0: "n0", 1: "n1", 2: "n2"}
    job.running = Running(job.spec.parallelism, places=((1, 3),))
    world.look()
    assert dict(world.watch._placed["a"].node_of_rank) == {0: "n0", 1: "n3", 2: "n2"}


def test_racks_are_read_from_the_nodes_and_switches_accused() -> None:
    world = World(rack_label="rack")
    world.api.racks = {f"{rack}{i}": rack for rack in "ABC" for i in range(4)}
    world.job("one", ["A0", "A1", "B0", "B1"]).slow = {(1, 0)}
    world.job("two", ["A2", "A3", "C0", "C1"]).slow = {(1, 0)}
    world.job("three", ["A1", "A0", "C2", "C3"]).slow = {(1, 0)}
    world.job("four", ["A3", "A2", "B3", "B2"]).slow = {(1, 0)}
    world.job("five", ["B0", "B1", "C0", "C1"])
    world.look()
    assert [(f.kind, f.name) for f in findings_of(world.api.saved or {})] == [("uplink", "A")]
    assert world.found() == []


def test_sick_ports_of_an_accused_node_are_named() -> None:
    world = World()
    world.sick_node()
    port = SimpleNamespace(stage=1, replica=0, device="mlx5_0", port=1)
    world.jobs[0].sick = (port,)
    world.look()
    (finding,) = findings_of(world.api.saved or {})
    assert finding.ports == ("mlx5_0/1",)
    assert "its ports mlx5_0/1 report errors" in finding.text


@pytest.mark.parametrize("damage", ["{", "[]", '{"names": 3}', "null"])
def test_what_cannot_be_read_is_no_obstacle(damage: str, caplog: pytest.LogCaptureFixture) -> None:
    world = World()
    world.api.saved = {"data": {"findings": damage, "memory": damage}}
    world.sick_node()
    world.look()
    assert world.found() == ["bad"]
    assert "memory cannot be read" in caplog.text


def test_pods_of_many_jobs_are_looked_up_over_several_rounds() -> None:
    world = World()
    for number in range(fabric.MOST_LISTS + 5):
        world.job(f"job-{number}", [f"a{number}", f"b{number}"])
    world.look()
    assert world.api.lists == fabric.MOST_LISTS
    world.look()
    assert world.api.lists == fabric.MOST_LISTS + 5


def test_jobs_whose_nodes_are_never_known_do_not_keep_others_from_their_turn() -> None:
    world = World()
    for number in range(fabric.MOST_LISTS):
        world.job(f"job-{number}", ["a", "b"])
        del world.api.pods[f"job-{number}"][1]["spec"]["nodeName"]
    world.look()
    world.job("later", ["c", "d"])
    world.look()
    assert [e.ends[0].node for e in world.watch.memory.evidence(world.now)] == ["c"]


@pytest.mark.parametrize("damage", ["forbidden", "no number", "a number twice"])
def test_pods_that_cannot_be_read_do_not_hide_those_of_other_jobs(damage: str) -> None:
    """Who may change pods of a namespace can make them so."""
    world = World()
    world.job("broken", ["x", "y"])
    if damage == "forbidden":
        world.api.forbidden = "broken"
    else:
        index = {"no number": "none", "a number twice": "0"}[damage]
        for each in world.api.pods["broken"]:
            each["metadata"]["annotations"]["batch.kubernetes.io/job-completion-index"] = index
        world.api.pods["broken"].append(pod(7, "z", "broken-job"))
    world.sick_node()
    world.look()
    assert world.found() == ["bad"]


class Replicas(World):
    """Two replicas, each with some of the jobs: the first judges, until another one is said to."""

    def __init__(self) -> None:
        super().__init__()
        self.judge = 0
        self.of: list[list[Job]] = [[], []]
        self.watches = [self.another(i) for i in range(2)]

    def another(self, number: int) -> FabricWatch:
        api: Any = self.api

        def part() -> Part:
            return Part(self.judge == number, str(number), (str(1 - number),))

        return FabricWatch(api, lambda: self.of[number], PLACE, "", part, clock=lambda: self.now)

    def both_look(self, times: int = 2) -> None:
        for _ in range(times):
            self.now += 30.0
            for watch in reversed(self.watches):
                asyncio.run(watch.look())

    def add(self, number: int, job: Job) -> Job:
        self.of[number].append(job)
        return job


def test_jobs_of_different_replicas_accuse_the_node_they_share() -> None:
    world = Replicas()
    one = world.add(0, Job("one", ["a", "bad", "b", "c"], world.api))
    two = world.add(1, Job("two", ["d", "e", "f", "bad"], world.api))
    world.both_look()
    assert world.api.writes == 0, "all is well"
    one.slow = {(0, 0), (1, 0)}
    world.both_look()
    assert (world.found(), world.found(accused=False)) == ([], ["bad"])
    two.slow = {(2, 0)}
    two.sick = (SimpleNamespace(stage=3, replica=0, device="mlx5_0", port=1),)
    world.both_look()
    assert world.found() == ["bad"]
    (finding,) = findings_of(world.api.saved or {})
    assert (finding.slow, finding.ports) == (3, ("mlx5_0/1",))
    writes = world.api.writes
    world.both_look()
    assert world.api.writes == writes, "nothing is new"
    # Another one judges: it knows what was published, and what it has seen itself.
    world.judge, world.of[0] = 1, []
    world.watches[0] = world.another(0)
    world.both_look()
    assert world.found() == ["bad"]
    assert len(world.watches[1].memory) == 6


def test_links_of_another_replicas_jobs_clear_a_node() -> None:
    world = Replicas()
    world.add(0, Job("one", ["a", "bad", "b", "c"], world.api)).slow = {(0, 0), (1, 0)}
    world.both_look()
    assert world.found(accused=False) == ["bad"]
    # Of a job none of whose links is slow, but some are at a suspected node.
    for i in range(4):
        world.add(1, Job(f"well-{i}", [f"x{i}", "bad", f"y{i}", f"z{i}"], world.api))
    world.both_look()
    assert world.found(accused=False) == []


def test_what_a_replica_said_about_ports_long_ago_counts_no_more() -> None:
    world = Replicas()
    world.add(0, Job("one", ["a", "bad", "b", "c"], world.api)).slow = {(0, 0), (1, 0)}
    other = world.add(1, Job("two", ["d", "e", "f", "bad"], world.api))
    other.slow = {(2, 0)}
    other.sick = (SimpleNamespace(stage=3, replica=0, device="mlx5_0", port=1),)
    world.both_look()
    assert findings_of(world.api.saved or {})[0].ports
    world.watches.pop()
    world.both_look(25)
    assert findings_of(world.api.saved or {})[0].ports == ()


def checked(pods: int, sick: set[tuple[int, int]], at: float = 0.0, ports: int = 1) -> FabricView:
    """A check of every pair of pods, over so many ports."""
    names = tuple(f"mlx5_{port}/1" for port in range(ports))
    pairs = tuple(
        FabricPair(a, b, (port, port), (a, b) in sick and port == 0, 1e9, 4e-6)
        for a in range(pods)
        for b in range(a + 1, pods)
        for port in range(ports)
    )
    return FabricView(pods, len(pairs), at=at, ports=names, pairs=pairs)


def test_pairs_that_a_check_before_training_found_sick_are_in_the_memory() -> None:
    """The next job is placed by it, though no link of this one is slow."""
    world = World()
    job = world.job("one", ["a", "bad", "b", "c"])
    job.checked = checked(4, {(0, 1), (1, 2), (1, 3)}, at=world.now)
    world.look()
    assert "bad" in world.found(accused=False)
    (told, *_) = findings_of(world.api.saved or {})
    assert (told.kind, told.name, told.slow) == ("port", "bad/mlx5_0/1", 3)
    world.jobs.clear()
    world.watch = world.started()
    world.look()
    assert "bad" in world.found(accused=False), "the job has ended"


def test_a_check_counts_once_as_of_when_it_was_made() -> None:
    world = World()
    job = world.job("one", ["a", "bad", "b", "c"])
    job.checked = checked(4, {(0, 1), (1, 2), (1, 3)}, at=world.now)
    for _ in range(3):
        world.look(2 * HALF_LIFE)
    slow = [e.slow for e in world.watch.memory.evidence(world.now) if e.slow]
    assert slow == pytest.approx([1 / 64] * 3, rel=0.01), "the links are well since then"
    job.attempt, job.checked = 1, checked(4, {(1, 2)}, at=world.now)
    world.api.pods["one"] = [pod(i, f"n{i}", job.job_uid) for i in range(4)]
    world.look()
    ends = {e.ends[0].node for e in world.watch.memory.evidence(world.now) if e.slow > 0.9}
    assert ends == {"n1"}, "another attempt has another check"


def test_a_check_that_is_well_clears_what_another_has_found_and_else_leaves_no_trace() -> None:
    world = World()
    world.job("well", ["x", "y", "z"]).checked = checked(3, set(), at=world.now)
    world.look()
    assert len(world.watch.memory) == 2, "its links"
    world.job("one", ["a", "bad", "b", "c"]).checked = checked(
        4, {(0, 1), (1, 2), (1, 3)}, at=world.now
    )
    world.look()
    assert world.found(accused=False)
    world.look(900.0)
    again = world.job("two", ["c", "b", "bad", "a"])
    again.checked = checked(4, set(), at=world.now)
    world.look()
    assert world.found(accused=False) == []


def test_what_a_forged_check_says_of_other_pods_and_ports_is_left_out() -> None:
    world = World()
    job = world.job("one", ["a", "b"])
    forged = [FabricPair(0, n, (0, 0), True) for n in range(2, 60)]
    forged += [FabricPair(0, 1, (0, 9), True), FabricPair(1, 1, (0, 0), True)]
    job.checked = FabricView(60, 60, ports=("p",), pairs=tuple(forged))
    world.look()
    assert [e.slow for e in world.watch.memory.evidence(world.now)] == [0.0]
    # However many ports it names between two nodes.
    names = tuple(f"p{n}" for n in range(32))
    pairs = tuple(FabricPair(0, 1, (a, b), True) for a in range(8) for b in range(8))
    job.attempt, job.checked = 1, FabricView(2, 64, ports=names, pairs=pairs)
    world.look()
    evidence = world.watch.memory.evidence(world.now)
    assert sum(e.slow for e in evidence) == fabric.MOST_RAILS
