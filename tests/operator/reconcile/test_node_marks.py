"""What the operator does with findings about nodes: conditions, events, taints, placement."""

from __future__ import annotations

import asyncio
import copy
import json
from dataclasses import replace
from typing import Any

import pytest
from fake_api import FakeCluster
from operator_objects import CONFIG, World, body

from pipemorph.fabric.findings import Finding
from pipemorph_operator.cluster.client import ApiRefused, path
from pipemorph_operator.cluster.fabric_map import Place
from pipemorph_operator.reconcile.nodes import RELIST_LOOKS, NodeMarks

PLACE = Place("system", "fabric")
TAINT = "pipemorph.io/network-slow"
Object = dict[str, Any]


def node(name: str) -> Object:
    ready = {"type": "Ready", "status": "True"}
    return {
        "apiVersion": "v1",
        "kind": "Node",
        "metadata": {"name": name, "uid": f"uid-{name}"},
        "spec": {"taints": [{"key": "gpu", "effect": "NoSchedule"}]},
        "status": {"conditions": [ready]},
    }


class Api(FakeCluster):
    """The API server: nodes, events and the ConfigMap."""

    def __init__(self, *names: str) -> None:
        super().__init__(*map(node, names))
        self.conflicts = 0
        """How many writes somebody else gets ahead of."""
        self.guarded = ""

    def tell(self, *names: str, accused: bool = True, confidence: float = 0.95) -> None:
        findings = [
            Finding("node", name, confidence - i / 100, accused, 3, 4, 0.0).record()
            for i, name in enumerate(names)
        ]
        metadata = {"namespace": PLACE.namespace, "name": PLACE.name}
        data = {"findings": json.dumps(findings)}
        self.put({"apiVersion": "v1", "kind": "ConfigMap", "metadata": metadata, "data": data})

    async def arrives(self, verb: str, url: str) -> None:
        if verb != "replace":
            return
        if self.conflicts:
            self.conflicts -= 1
            changed = copy.deepcopy(self.objects[url])
            changed["metadata"]["labels"] = {"changed": "meanwhile"}
            self.put(changed)
        if self.guarded and url.endswith(f"/{self.guarded}"):
            raise ApiRefused(403, "Forbidden", "an admission policy says so")

    @property
    def writes(self) -> int:
        return len(self.made("replace")) + len(self.made("apply"))

    @property
    def lists(self) -> int:
        return len(self.made("list"))

    @property
    def events(self) -> list[tuple[str, str, str]]:
        found = [each for each in self.objects.values() if each["kind"] == "Event"]
        assert all(each["metadata"]["namespace"] == "default" for each in found)
        return [(each["type"], each["reason"], each["involvedObject"]["name"]) for each in found]

    def node(self, name: str) -> Object:
        return self.objects[path("Node", None, name)]

    def taint(self, name: str) -> list[str]:
        return [t["effect"] for t in self.node(name)["spec"]["taints"] if t["key"] == TAINT]

    def condition(self, name: str) -> str:
        found = [
            c["status"]
            for c in self.node(name)["status"]["conditions"]
            if c["type"] == "PipeMorphNetworkSlow"
        ]
        return found[0] if found else ""


def marks(api: Api, **settings: Any) -> NodeMarks:
    return NodeMarks(api, PLACE, **settings)


def look(made: NodeMarks, times: int = 1) -> None:
    for _ in range(times):
        asyncio.run(made.look())


def test_an_accused_node_gets_a_condition_an_event_and_a_taint_until_it_is_well() -> None:
    api = Api("a", "b")
    made = marks(api, conditions=True, taint="PreferNoSchedule")
    api.tell("a")
    look(made, 3)
    assert (api.condition("a"), api.taint("a"), api.writes) == ("True", ["PreferNoSchedule"], 2)
    assert (api.condition("b"), api.taint("b")) == ("", [])
    assert api.node("a")["spec"]["taints"][0]["key"] == "gpu", "others' taints stay"
    api.tell()
    look(made, 3)
    assert (api.condition("a"), api.taint("a"), api.writes) == ("False", [], 4)
    assert api.node("a")["spec"]["taints"] == [{"key": "gpu", "effect": "NoSchedule"}]
    assert api.events == [("Warning", "LinksSlow", "a"), ("Normal", "LinksRecovered", "a")]


def test_suspected_nodes_are_avoided_and_not_marked() -> None:
    api = Api("a")
    made = marks(api, conditions=True, taint="NoSchedule")
    api.tell("a", accused=False, confidence=0.6)
    look(made)
    assert (made.suspects, api.writes) == (("a",), 0)


def test_without_the_right_to_mark_nodes_none_is_read_or_written() -> None:
    api = Api("a")
    made = marks(api)
    api.tell("a")
    look(made, 2)
    assert (made.suspects, api.writes, api.lists) == (("a",), 0, 0)


def test_a_restarted_operator_clears_marks_that_it_no_longer_knows() -> None:
    api = Api("a")
    api.tell("a")
    look(marks(api, conditions=True, taint="NoSchedule"))
    api.tell()
    look(marks(api, conditions=True, taint="NoSchedule"))
    assert (api.condition("a"), api.taint("a")) == ("False", [])


def test_only_so_many_nodes_are_tainted_the_surest_first() -> None:
    api = Api("a", "b", "c")
    made = marks(api, taint="NoSchedule", most_tainted=2)
    api.tell("c", "a", "b")
    look(made)
    assert [api.taint(name) for name in "abc"] == [["NoSchedule"], [], ["NoSchedule"]]
    assert api.condition("a") == "" and api.events == []


def test_a_node_that_changed_meanwhile_is_marked_at_the_next_look_and_one_that_is_gone_is_not() -> (
    None
):
    api = Api("a")
    api.conflicts = 1
    made = marks(api, taint="NoSchedule")
    api.tell("gone", "a")
    look(made)
    assert api.taint("a") == []
    look(made)
    assert api.taint("a") == ["NoSchedule"]


def test_a_taint_stays_where_it_is_while_other_nodes_become_surer() -> None:
    api = Api("a", "b", "c")
    made = marks(api, taint="NoSchedule", most_tainted=2)
    api.tell("a", "b", "c")
    look(made)
    api.tell("c", "b", "a")
    look(made)
    assert [api.taint(name) for name in "abc"] == [["NoSchedule"], ["NoSchedule"], []]
    api.tell("c", "b")
    look(made)
    assert [api.taint(name) for name in "abc"] == [[], ["NoSchedule"], ["NoSchedule"]]


def test_a_node_that_cannot_be_marked_does_not_keep_others_from_it(
    caplog: pytest.LogCaptureFixture,
) -> None:
    api = Api("a", "b")
    api.guarded = "a"
    made = marks(api, taint="NoSchedule")
    api.tell("a", "b")
    look(made)
    assert (api.taint("a"), api.taint("b")) == ([], ["NoSchedule"])
    assert "node a cannot be marked" in caplog.text


def test_marks_that_somebody_removed_come_back() -> None:
    api = Api("a")
    made = marks(api, taint="NoSchedule")
    api.tell("a")
    look(made)
    api.node("a")["spec"]["taints"] = []
    look(made, RELIST_LOOKS)
    assert api.taint("a") == ["NoSchedule"]
    assert api.lists == 2


@pytest.mark.parametrize("enabled", [True, False])
def test_the_next_attempt_avoids_suspect_nodes_where_there_is_room(enabled: bool) -> None:
    placement = {"nodeExclusion": {"enabled": enabled}}
    config = replace(CONFIG, suspect_nodes=("bad", "worse"))
    decision = World(body(placement=placement), config).turn()
    job = next(obj for obj in decision.apply if obj["kind"] == "Job")
    affinity = job["spec"]["template"]["spec"].get("affinity", {}).get("nodeAffinity", {})
    assert "requiredDuringSchedulingIgnoredDuringExecution" not in affinity, "never starves"
    preferred = affinity.get("preferredDuringSchedulingIgnoredDuringExecution", [])
    named = [f["values"] for p in preferred for f in p["preference"]["matchFields"]]
    assert named == ([["bad"], ["worse"]] if enabled else [])
