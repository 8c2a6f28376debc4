"""The ingest on a real API server: accepted tokens and reports, and its durable state."""

import json
import re
import ssl
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, suppress
from statistics import median, quantiles

import pytest
from operator_support import DEADLINE, Jobs, condition, manifest
from played_ranks import Ranks
from strangers import connect_strangers, raised_file_limit, read_resident_kib
from testbed import ApiError, NotYet, wait_for
from testbed.api import Object

from pipemorph.terminal import render_parts
from pipemorph.views.explanation import explain_job

pytest_plugins = ("operator_fixtures",)
pytestmark = pytest.mark.cluster

SLOW = 0.06
FLOODS, TURNS, ITERATIONS = 8, 3, 25
"""Connections of a flood; turns; iterations of each, without it and under it."""
MOST_TIMES = 2.0
"""Limit of another job's waits under an attack, times its waits without."""
STALL = 0.25
"""Seconds that a tenth of them may take."""
STRANGERS, STRANGERS_TLS = 1250, 100
"""Connections without a token, of each kind; of those that complete a handshake."""
MOST_SECONDS, MOST_KIB = 3.0, 60 << 10
"""Until a report is answered among them, and memory that they may cost the ingest."""


def test_a_slow_link_is_reported_adapted_to_and_reported_recovered(jobs: Jobs) -> None:
    jobs.apply(manifest("story"))
    pods = jobs.run("story", 4)
    assert condition(
        jobs.wait("story", lambda job: condition(job, "LinksHealthy")[0] == "Unknown"),
        "LinksHealthy",
    ) == ("Unknown", "NoReportsYet")
    ranks = Ranks.of(jobs, "story", pods[0])
    ranks.until("LinksHealthy=True")
    normal, lean = ranks.seconds[-1], ranks.peak_memory
    ranks.delays[1] = SLOW
    ranks.run(1)
    disturbed = ranks.seconds[-1]
    assert disturbed > 1.2 * normal
    ranks.until("LinksHealthy=False")
    job = ranks.until("ScheduleAdapted=True")
    assert ranks.seconds[-1] < 0.85 * disturbed
    training = job["status"]["training"]
    assert training["slowLinkCount"] == 1
    assert training["slowLinks"][0]["link"] == 1
    assert abs(training["slowLinks"][0]["delayMs"] - 60) < 10
    assert training["appliedPlanVersion"] == training["wantedPlanVersion"] >= 1
    ranks.run(8)
    effect = jobs.wait(
        "story",
        lambda job: (
            {"bubbleAfter", "measured"} <= job["status"]["training"]["lastAdaptation"].keys()
        ),
    )["status"]["training"]["lastAdaptation"]
    assert effect["iterationSecondsAfter"] < effect["iterationSecondsBefore"]
    assert effect["warmupAfter"] != effect["warmupBefore"] or effect["kind"] == "adapt"
    # More microbatches in flight take more memory, which both figures show.
    assert (effect["peakMemoryBefore"], effect["peakMemoryAfter"]) == (lean, ranks.peak_memory)
    assert sum(lean) < sum(ranks.peak_memory)
    printed = jobs.cluster.kubectl("get", "pmj", "story", "-n", jobs.namespace, "-o", "json")
    lines = render_parts(explain_job(json.loads(printed)).to_table()).splitlines()
    assert "link 1 (+60 ms" in lines[1]
    assert "the plan changes saved" in lines[-2]
    assert "check the network between the hosts of the slow link" in lines[-1]
    expect_a_story(jobs.cluster.kubectl("describe", "pmj", "story", "-n", jobs.namespace))
    row = jobs.row("story")
    assert re.fullmatch(r"\d+%", row["DONE"]) and re.fullmatch(r"\d+%", row["GOODPUT"])
    assert re.fullmatch(r"\d+%/-?\d+%", row["GAIN"])
    ranks.delays[1] = 0.0
    ranks.until("LinksHealthy=True")
    back = ranks.until("ScheduleAdapted=False")
    assert condition(back, "ScheduleAdapted")[1] in ("ReturnedToInitialPlan", "PlanPending")
    shown = jobs.row("story")
    assert (shown["STATE"], shown["READY"]) == ("Running", "4/4")
    for reason in ("SlowLinks", "PlanInEffect", "AllLinksHealthy"):
        jobs.expect_event("story", reason)


IN_PERCENT = {
    "Bubble Fraction": "Progress",
    "Bubble Before": "Effect",
    "Bubble After": "Effect",
    "Promised": "Effect",
    "Measured": "Effect",
    "Goodput": "Goodput Percent",
}
"""Fractions, which are for programs, and the text that has each in percent."""


def expect_a_story(described: str) -> None:
    """Expect the output of ``kubectl describe`` for a job with a slow link that was adapted to."""
    columns = {
        key: value.strip()
        for line in described.splitlines()
        for key, _, value in [line.strip().partition(":")]
    }
    assert columns["Name"] == "link 1 (stage 1 to 2)", "that of the slow link is the last one"
    assert re.fullmatch(r"\d+ of 100 iterations \(\d+%\); [\d.]+ s each, .*", columns["Progress"])
    assert "s became" in columns["Effect"] and columns["Done"] in columns["Progress"]
    for key, value in columns.items():
        # Such a name has its unit.
        if re.fullmatch(r"-?0\.\d+", value) and not re.search(r"Seconds|\bMs\b", key):
            if key == "Confidence":
                continue  # A probability.
            assert f"{float(value):.0%}" in columns[IN_PERCENT[key]], f"{key}: {value}"


def test_a_writer_that_is_behind_loses(jobs: Jobs) -> None:
    """A replica falls behind when it is killed while its write is on its way, or is cut off."""
    jobs.apply(manifest("behind", stages=1, managedBy="somebody.else/here"))
    client = jobs.cluster.client

    def write(status: Object) -> Object:
        body = {"status": status}
        return client.patch("pipemorphjobs", "behind", body, jobs.namespace, subresource="status")

    write({"attempt": 5, "control": {"planVersion": 7}})
    for status, words in (
        ({"attempt": 4}, "attempt must not decrease"),
        ({"attempt": None}, "attempt must not decrease"),
        ({"control": {"planVersion": 6}}, "planVersion must not decrease"),
        ({"control": None}, "control must not be removed"),
    ):
        with pytest.raises(ApiError, match=words):
            write(status)
    read = write({"attempt": 6, "control": {"planVersion": 8}})
    write({"ready": "1/1"})

    # The ingest names the version that it has read.
    def apply(version: str) -> None:
        about = {"name": "behind", "resourceVersion": version}
        body = {"apiVersion": read["apiVersion"], "kind": read["kind"], "metadata": about}
        body["status"] = {"control": read["status"]["control"]}
        client.patch(
            "pipemorphjobs", "behind", body, jobs.namespace,
            subresource="status?fieldManager=pipemorph-ingest&force=true",
            content_type="application/apply-patch+yaml",
        )  # fmt: skip

    with pytest.raises(ApiError, match="modified"):
        apply(read["metadata"]["resourceVersion"])
    apply(jobs.get("behind")["metadata"]["resourceVersion"])


@pytest.mark.parametrize("seconds", [0.0, pytest.param(70.0, marks=pytest.mark.soak)])
def test_jobs_adapt_while_the_api_server_is_away(jobs: Jobs, seconds: float) -> None:
    """The API server goes ``seconds`` before a link turns slow: longer than tokens are valid."""
    cluster = jobs.cluster
    trainer = {"module": "pipemorph_trainer.examples.emulated", "iterations": 1_000_000}
    jobs.apply(manifest("away", trainer=trainer))
    pods = jobs.run("away", 4)
    ranks = Ranks.of(jobs, "away", pods[0])
    ranks.run(4)
    jobs.wait("away", lambda job: job["status"].get("training"))
    cluster.control_plane.stop_apiserver()
    stopped = time.monotonic()
    try:
        while time.monotonic() - stopped < seconds:
            ranks.run(1)
        ranks.delays[1] = SLOW
        # Reports are taken meanwhile: the token was checked before.
        wait_for("a directive", lambda: ranks.observed > 0 or ranks.run(1), DEADLINE, interval=0.0)
    finally:
        cluster.control_plane.start_apiserver()
    ranks.until("ScheduleAdapted=True")
    control = jobs.get("away")["status"]["control"]
    assert control["planVersion"] == ranks.observed > 0


def test_only_a_pod_of_the_job_may_speak_for_it(jobs: Jobs) -> None:
    for name in ("mine", "other"):
        jobs.apply(manifest(name, stages=1))
    mine, other = jobs.run("mine", 1)[0], jobs.run("other", 1)[0]
    stranger = {
        "metadata": {"name": "stranger"},
        "spec": {
            "schedulerName": "absent",
            "containers": [{"name": "a", "image": "none.invalid/a"}],
        },
    }
    jobs.cluster.client.create("pods", stranger, jobs.namespace)
    ranks = Ranks.of(jobs, "mine", mine)
    ranks.run(2)
    good = ranks.report(sequence=99).model_dump_json().encode()
    forged = ranks.token[:-4] + ("AAAA" if not ranks.token.endswith("AAAA") else "BBBB")
    unbound = jobs.cluster.service_account_token(
        jobs.namespace,
        "default",
        audience=f"pipemorph.io/jobs/{jobs.namespace}/mine/{jobs.get('mine')['metadata']['uid']}",
    )
    with jobs.cluster.namespace() as elsewhere:
        namesake = Jobs(jobs.installation, elsewhere)
        namesake.apply(manifest("mine", stages=1))
        of_namesake = namesake.token("mine", namesake.run("mine", 1)[0])
    metric = jobs.installation.ingest.metric
    cases = [
        ("audience", 401, of_namesake),
        ("review", 401, forged),
        ("malformed", 401, "not.a-token"),
        ("audience", 401, jobs.token("other", other)),
        ("audience", 401, jobs.token("mine", mine, audience="https://kubernetes.default.svc")),
        ("pod", 403, jobs.token("mine", stranger)),
        ("pod", 403, jobs.token("mine", other)),
        ("unbound", 403, unbound),
        ("expired", 401, jobs.cluster.expired(ranks.token)),
    ]
    for reason, expected, token in cases:
        counted = metric("pipemorph_ingest_refused_total", reason=reason)
        status, answer = ranks.post(good, token=token)
        assert (reason, status) == (reason, expected), answer
        assert metric("pipemorph_ingest_refused_total", reason=reason) == counted + 1
    counted = metric("pipemorph_ingest_requests_total", kind="report", code="401")
    assert ranks.post(good, token="")[0] == 401
    assert metric("pipemorph_ingest_requests_total", kind="report", code="401") == counted + 1
    # None of it had an effect: the good one is still news.
    assert ranks.post(good)[0] == 200


def test_a_storm_of_one_job_does_not_delay_another(jobs: Jobs) -> None:
    """The other's reports wait at most twice as long as without, measured in turn: a machine that
    is busy is so in both. The flood comes from the process that measures."""
    for name in ("storm", "calm"):
        jobs.apply(manifest(name, stages=2))
    storm = Ranks.of(jobs, "storm", jobs.run("storm", 2)[0])
    calm = Ranks.of(jobs, "calm", jobs.run("calm", 2)[0])
    body = b"{" + b" " * 30_000
    waits: dict[str, list[float]] = {"alone": [], "flooded": []}

    def train(when: str) -> None:
        calm.waits = []
        calm.run(ITERATIONS)
        waits[when] += calm.waits

    calm.run(3)
    codes: set[int] = set()
    with ThreadPoolExecutor(FLOODS) as pool:
        for _ in range(TURNS):
            train("alone")
            stop = threading.Event()
            floods = [pool.submit(storm.flood, body, stop) for _ in range(FLOODS)]
            try:
                train("flooded")
            finally:
                stop.set()
            codes.update(*(flood.result() for flood in floods))
    assert codes <= {400, 429}
    assert 429 in codes, "the storm was not limited"
    found = {
        when: (median(each), quantiles(each, n=10)[-1], len(each)) for when, each in waits.items()
    }
    alone, flooded = found["alone"], found["flooded"]
    print(f"median, p90 and number of waits, seconds: {found}")
    assert flooded[0] < MOST_TIMES * alone[0], found
    assert flooded[1] < max(MOST_TIMES * alone[1], STALL), found


def test_strangers_do_not_keep_a_rank_out(jobs: Jobs) -> None:
    """5,000 connections from two addresses, one of them the rank's own: silent, within a handshake,
    without TLS, and some that send a forged token."""
    jobs.apply(manifest("calm", stages=2))
    calm = Ranks.of(jobs, "calm", jobs.run("calm", 2)[0])
    calm.run(3)
    installation = jobs.installation
    pid, port = installation.ingest.process.pid, installation.port
    hello = ssl.MemoryBIO()
    client = installation.trust.wrap_bio(ssl.MemoryBIO(), hello, server_hostname="ingest")
    with suppress(ssl.SSLWantReadError):
        client.do_handshake()
    first = hello.read()
    before = read_resident_kib(pid)
    with raised_file_limit(4 * STRANGERS + STRANGERS_TLS + 1024), ExitStack() as stack:
        for sent in (b"", first[:40], first, b"GET /v1/job HTTP/1.1\r\nHost: x\r\n"):
            connect_strangers(stack, port, STRANGERS, sent)
        forged = {"Authorization": "Bearer a.b.c"}
        for _ in range(STRANGERS_TLS):
            stranger = stack.enter_context(closing(installation.connection()))
            with suppress(OSError):
                stranger.request("GET", "/v1/jobs/default/calm", headers=forged)

        def report() -> bool:
            # Connections of an address are limited in rate. Agents try again, too.
            try:
                calm.run(1)
            except OSError as error:
                raise NotYet(str(error)) from error
            return True

        began = time.monotonic()
        wait_for("a report is answered", report, MOST_SECONDS, interval=0.05)
        took = time.monotonic() - began
        grown = read_resident_kib(pid) - before
    print(f"strangers: a report was answered in {took:.2f} s, {grown / 1024:.1f} MiB more")
    assert grown < MOST_KIB, f"{grown / 1024:.1f} MiB"


def test_nodes_whose_links_stay_slow_are_avoided(jobs: Jobs) -> None:
    placement = {"excludeNodes": ["no-1", "no-2"]}
    # A link that is slow at the end must still be slow when the operator reads it.
    lasting = {"staleAfterSeconds": 600.0}
    jobs.apply(
        manifest("slow", failurePolicy={"maxRestarts": 3}, placement=placement, adaptation=lasting)
    )
    cluster = jobs.cluster
    nodes = [f"{jobs.namespace}-{i}" for i in range(6)]
    for node in nodes:
        cluster.fake_node(node)
    seats = {0: [0, 1, 2, 3], 1: [4, 1, 5, 3]}  # link 1 is slow: ranks 1 and 2; node 1 stays
    for attempt, seat in seats.items():
        pods = jobs.pods("slow", 4, attempt)
        for pod, node in zip(pods, seat, strict=True):
            cluster.fake_pod_running(jobs.namespace, pod["metadata"]["name"], node=nodes[node])
        jobs.wait("slow", "Running")
        ranks = Ranks.of(jobs, "slow", pods[0], attempt)
        ranks.run(4)
        ranks.delays[1] = SLOW
        ranks.until("LinksHealthy=False")
        # Meanwhile they train. The operator reads where the pods of a slow link run.
        jobs.wait(
            "slow",
            lambda job, a=attempt, r=ranks: (
                (
                    job["status"]["training"]["attempt"] == a
                    and job["status"]["training"]["slowLinks"]
                    and job["status"].get("attemptNodes", {}).get("links")
                )
                or r.run(1)
            ),
        )
        cluster.fake_pod_failed(jobs.namespace, pods[3]["metadata"]["name"])
        for pod in pods[:3]:
            wait_for(
                "the Job controller to stop the others",
                lambda p=pod: (
                    "deletionTimestamp"
                    in cluster.client.get("pods", p["metadata"]["name"], jobs.namespace)["metadata"]
                ),
                DEADLINE,
            )
            cluster.fake_pod_gone(jobs.namespace, pod["metadata"]["name"])
    third = jobs.pods("slow", 4, attempt=2)[0]
    terms = third["spec"]["affinity"]["nodeAffinity"][
        "requiredDuringSchedulingIgnoredDuringExecution"
    ]["nodeSelectorTerms"]
    assert terms[0]["matchFields"] == [
        {"key": "metadata.name", "operator": "NotIn", "values": [node]}
        for node in sorted(["no-1", "no-2", nodes[1]])
    ]
    jobs.expect_event("slow", "Warning NodeExcluded")
