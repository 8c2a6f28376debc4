"""Objects deleted while watches are down, with history that is dropped, leave no ghost."""

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from api_proxy import api_proxy
from operator_support import DEADLINE, FULL_NAME, Jobs, manifest
from testbed import ApiClient, Cluster, wait_for

pytest_plugins = ("operator_fixtures",)
pytestmark = pytest.mark.cluster


def test_what_goes_while_the_watches_are_down_leaves_no_ghost(
    jobs: Jobs, cluster: Cluster, tmp_path: Path
) -> None:
    plane, installation = cluster.control_plane, jobs.installation
    installation.operator.process.stop()
    installation.ingest.process.stop()
    with (
        api_proxy(cluster, installation.account(), tmp_path / "operator") as operators,
        api_proxy(
            cluster, installation.account(f"{FULL_NAME}-ingest"), tmp_path / "ingest"
        ) as ingests,
    ):
        operator = installation.replica("behind", operators.kubeconfig)
        ingest, port = installation.ingest_replica("behind-ingest", ingests.kubeconfig)

        def answer(name: str) -> int:
            """The ingest answers a stranger: 403 for a job that it does not know, else 401."""
            url = f"/v1/jobs/{jobs.namespace}/{name}/reports"
            return installation.request("POST", url, token="a.b.c", body=b"{}", port=port)[0]

        try:
            operator.start()
            ingest.start()
            for name in ("goes", "stays"):
                jobs.apply(manifest(name, stages=2, failurePolicy={"maxRestarts": 1}))
                jobs.run(name, 2)
                wait_for("the ingest to know the job", lambda n=name: answer(n) == 401, DEADLINE)
            lists = {
                (program, kind): program.metric("pipemorph_watch_lists_total", kind=kind)
                for program, kind in ((operator, "Job"), (ingest, "PipeMorphJob"))
            }
            operators.cut()
            ingests.cut()
            page = first_page(jobs)
            cluster.client.delete("pipemorphjobs", "goes", jobs.namespace)
            (child,) = jobs.batch_jobs("stays")
            cluster.client.delete("jobs", child["metadata"]["name"], jobs.namespace)
            jobs.expect_all_gone("goes")
            jobs.expect_all_gone("stays")
            plane.forget()
            assert answers(jobs, page) == [(410, "Expired"), ("ERROR", 410, "Expired"), None]
            operators.open()
            ingests.open()
            wait_for("the ingest to forget the job", lambda: answer("goes") == 403, DEADLINE)
            assert answer("stays") == 401
            # A Job that is known for a Job with pods would keep the job from being suspended.
            jobs.run("stays", 2, attempt=1)
            jobs.patch("stays", {"suspend": True})
            jobs.wait("stays", "Suspended")
            for (program, kind), count in lists.items():
                assert program.metric("pipemorph_watch_lists_total", kind=kind) > count
        finally:
            operator.process.stop()
            ingest.process.stop()


def first_page(jobs: Jobs) -> dict[str, Any]:
    """First page of the metadata of a list of the namespace's two jobs."""
    client = jobs.cluster.client
    found = client.request(
        "GET", client.path("pipemorphjobs", jobs.namespace), query={"limit": "1"}
    )
    assert len(found["items"]) == 1
    metadata: dict[str, Any] = found["metadata"]
    return metadata


def answers(jobs: Jobs, page: dict[str, Any]) -> list[tuple[Any, ...] | None]:
    """Answers about the next page, past events, and a version that is not reached yet.
    tests/support/fake_api.py gives the same."""
    client = jobs.cluster.client
    path = client.path("pipemorphjobs", jobs.namespace)
    code, said = client.raw("GET", path, query={"limit": "1", "continue": page["continue"]})
    found: list[tuple[Any, ...] | None] = [(code, json.loads(said)["reason"])]
    since = int(page["resourceVersion"])
    for version in (since, since + 1_000_000):
        query = {"watch": "1", "resourceVersion": str(version), "timeoutSeconds": "2"}
        # For a moment after its start the API server has no cache that it could watch.
        ok, text = wait_for(
            "the API server to watch", partial(_watched, client, path, query), DEADLINE
        )
        assert ok == 200, text
        events = [json.loads(line) for line in text.splitlines()]
        errors = [(e["type"], e["object"]["code"], e["object"]["reason"]) for e in events]
        found.append(errors[0] if errors else None)
    return found


def _watched(client: ApiClient, path: str, query: dict[str, str]) -> tuple[int, bytes] | None:
    code, text = client.raw("GET", path, query=query)
    return None if code == 429 else (code, text)
