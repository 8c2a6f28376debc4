"""The manifests for Kubeflow Trainer, as far as they are ours: what is served, and who finds it."""

from __future__ import annotations

import argparse
import re
from pathlib import Path
from typing import Any

import yaml

from pipemorph.commands import serve as command
from pipemorph.manifest import parse_job

FOLDER = Path(__file__).parents[3] / "examples/kubeflow"


def documents(name: str) -> list[dict[str, Any]]:
    return list(yaml.safe_load_all((FOLDER / name).read_text()))


def test_served_names_are_those_that_ranks_request() -> None:
    (runtime,) = documents("runtime.yaml")
    config, train_job = documents("trainjob.yaml")
    jobs = {job["name"]: job for job in runtime["spec"]["template"]["spec"]["replicatedJobs"]}
    pods = {name: job["template"]["spec"]["template"]["spec"] for name, job in jobs.items()}
    (serve,), (node,) = (pods[name]["containers"] for name in ("control", "node"))

    ours = serve["args"][0].partition("exec pipemorph ")[2].split()
    parser = argparse.ArgumentParser()
    command.add_parser(parser.add_subparsers())
    given = parser.parse_args(ours)
    volumes = {volume["name"]: volume for volume in pods["control"]["volumes"]}
    mounted = {mount["mountPath"]: volumes[mount["name"]] for mount in serve["volumeMounts"]}
    assert mounted["/job"]["configMap"]["name"] == config["metadata"]["name"]
    assert f"/job/{next(iter(config['data']))}" == given.job
    for file in (given.token_file, given.secret_file, given.tls_cert, given.tls_key):
        assert "emptyDir" in mounted[str(Path(file).parent)], "only the pod's user may read it"

    env = {each["name"]: each.get("value") for each in node["env"]}
    assert re.sub(r".*:", "", env["PIPEMORPH_INGEST_URL"]) == given.listen.rpartition(":")[2]
    (volume,) = pods["node"]["volumes"]
    keys = {item["path"] for item in volume["secret"]["items"]}
    for name in ("TOKEN", "SECRET", "CA"):
        folder, _, file = env[f"PIPEMORPH_{name}_FILE"].rpartition("/")
        assert (folder, file in keys) == ("/identity", True)
    assert "tls.key" not in keys

    job = parse_job(config["data"]["job.yaml"])
    trainer = train_job["spec"]["trainer"]
    assert train_job["spec"]["runtimeRef"]["name"] == runtime["metadata"]["name"]
    ranks = trainer["numNodes"] * trainer["numProcPerNode"]
    assert job.spec.parallelism.world_size == ranks
    assert trainer["command"][-1] == job.spec.trainer.module
