"""``python -m pipemorph_operator.ingest``: the ingest process.

The replica that holds the Lease tracks the jobs that an informer reports, answers their agents and
launchers, and writes their status. Standbys only cache jobs, and answer 503. When another replica
leads, this process exits and restarts as a standby.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import logging
import signal
import ssl
from functools import cache, partial
from pathlib import Path

from prometheus_client import Counter

from pipemorph.argument_types import port_type, whole_number_type
from pipemorph.control import JobController
from pipemorph.control.job_generations import JobGenerations
from pipemorph.errors import InputError
from pipemorph.ingest import (
    ConnectionLimits,
    FirstPlanner,
    IngestServer,
    PlannerPool,
    RestartHandler,
    raise_open_files_limit,
)
from pipemorph.ingest.connections import SHARE_OF_FILES
from pipemorph.log_level import read_log_level
from pipemorph_operator import health_server
from pipemorph_operator.health_server import EventLoopMonitor, Heartbeat
from pipemorph_operator.ingest.auth import PodTokenAuthenticator
from pipemorph_operator.ingest.job_store import ClusterJobStore, StandbyJobCache
from pipemorph_operator.ingest.layout_changer import LayoutChanger
from pipemorph_operator.ingest.status.write_schedule import compute_visit_interval
from pipemorph_operator.kube.client import KubeClient
from pipemorph_operator.kube.election import LeaderElection, LeaderLabel, add_election_options
from pipemorph_operator.kube.informer import Informer, InformerGroup
from pipemorph_operator.metrics import (
    PLAN_SECONDS,
    PLAN_WAIT_SECONDS,
    PLANS_WAITING,
    REFUSED,
    REPORT_SECONDS,
    REPORTS,
)
from pipemorph_operator.names import INGEST_OWNER, KIND, LABEL_LEADER

log = logging.getLogger("pipemorph.ingest")

FIRST_PLAN_SECONDS = 600.0
"""Time limit of a job's first plan. The largest takes about 10 s on an idle CPU."""
ROUND_SECONDS = 300.0
"""Time limit of a round over all jobs; a round over 10,000 jobs takes 25 s."""
CERTIFICATE_SECONDS = 60.0
"""Interval of checks of the certificate's files, which are renewed in place."""
PERSIST_SECONDS = 1.0
"""Time in which a stopping leader persists served directives; its Lease lasts longer."""


def load_certificate(options: argparse.Namespace) -> ssl.SSLContext | None:
    """TLS context from the given files; None for plain HTTP. Raises OSError or ssl.SSLError."""
    if options.plain_http:
        return None
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.load_cert_chain(options.tls_cert, options.tls_key)
    context.num_tickets = 0  # No agent resumes a session: it would use no ticket.
    return context


async def renew_certificate(context: ssl.SSLContext, cert: str, key: str) -> None:
    """Reload the certificate when its files change, for new connections."""

    def read_mtimes() -> tuple[int, int]:
        return Path(cert).stat().st_mtime_ns, Path(key).stat().st_mtime_ns

    used = read_mtimes()
    while True:
        await asyncio.sleep(CERTIFICATE_SECONDS)
        try:
            found = read_mtimes()
            if found != used:
                context.load_cert_chain(cert, key)
                used = found
                log.info("the certificate was renewed")
        except (OSError, ssl.SSLError) as error:
            log.error("the renewed certificate is unusable; the old one stays in use: %s", error)


async def visit_jobs(server: IngestServer, store: ClusterJobStore, ticked: Heartbeat) -> None:
    """Visit all jobs in rounds: run their timers, and write status that is due."""
    busy: dict[tuple[str, str], asyncio.Task[None]] = {}
    clock = asyncio.get_running_loop().time
    while True:
        keys = store.keys
        ticked.record_beat()
        server.drop_stale_decisions()
        round_seconds = compute_visit_interval(len(keys))
        start = clock()
        for i, key in enumerate(keys):
            if key not in busy:
                # Each job has a task, so that a slow write of one does not delay the others.
                busy[key] = task = asyncio.create_task(_visit_job(server, store, key))
                task.add_done_callback(partial(_mark_idle, busy, key))
            # Spread the jobs over the round, so that a report waits for one job at most.
            await asyncio.sleep(start + round_seconds * (i + 1) / len(keys) - clock())
        await asyncio.sleep(start + round_seconds - clock())


def _mark_idle(
    busy: dict[tuple[str, str], asyncio.Task[None]], key: tuple[str, str], _: asyncio.Task[None]
) -> None:
    busy.pop(key, None)


async def _visit_job(server: IngestServer, store: ClusterJobStore, key: tuple[str, str]) -> None:
    try:
        await server.handler.tick_job(*key)
        await store.write_status_if_due(key)
    except Exception:
        log.exception("%s/%s: periodic update failed", *key)


@cache
def _get_response_counter(kind: str, status: int) -> Counter:
    """Counter of a kind and status. Cached, because the lookup costs more than the increment."""
    return REPORTS.labels(kind=kind, code=str(status))


def count_response(kind: str, status: int, seconds: float) -> None:
    """Count a response in the metrics."""
    _get_response_counter(kind, status).inc()
    if kind == "report":
        REPORT_SECONDS.observe(seconds)


def count_decision(waited: float, took: float) -> None:
    """Count a decision in the metrics."""
    PLAN_WAIT_SECONDS.observe(waited)
    PLAN_SECONDS.observe(took)


async def run(options: argparse.Namespace) -> None:
    """Run the ingest until SIGTERM or SIGINT, or until another process leads."""
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    async with await KubeClient.from_environment() as cluster:
        await serve(options, cluster, stop)


async def serve(options: argparse.Namespace, cluster: KubeClient, stop: asyncio.Event) -> None:
    """Stand by, and lead once elected, until ``stop`` is set. Sets it when another process leads:
    the jobs of this one are outdated then, and its container restarts as a standby."""
    context = load_certificate(options)
    wanted = SHARE_OF_FILES * options.max_connections
    if (files := raise_open_files_limit(wanted)) < wanted:
        log.warning(
            "this process may open %d files and accepts a third of that in connections, not"
            " --max-connections=%d; raise the container runtime's limit of open files to %d",
            files, options.max_connections, wanted,
        )  # fmt: skip
    first_planner = FirstPlanner(limit_seconds=FIRST_PLAN_SECONDS)
    # While the API server is unreachable, writes stop and adaptation continues.
    election = LeaderElection.from_options(cluster, options, INGEST_OWNER, outlasts_renewals=True)
    leading = cluster.with_write_permit(election.remaining_write_seconds)
    store = ClusterJobStore(leading, first_plan=first_planner, term=lambda: election.term)
    job_cache = StandbyJobCache(store)
    jobs = [
        Informer(cluster, KIND, job_cache.process_change, namespace=namespace)
        for namespace in options.namespace or [None]
    ]
    informers = InformerGroup(jobs)
    store.is_listed = informers.is_listed
    label: LeaderLabel | None = None
    if options.pods is not None:
        namespace, _ = options.lease
        label = LeaderLabel(cluster, namespace, options.identity, options.pods, owner=INGEST_OWNER)
    planner = PlannerPool(options.planners, on_decided=count_decision)
    PLANS_WAITING.set_function(lambda: planner.waiting_count)
    leads = False
    restart_handler = RestartHandler(store)
    layouts = LayoutChanger(store.find_tracked_job, restart_handler, planner.search_layout)
    server = IngestServer(
        store,
        PodTokenAuthenticator(
            cluster, store.find_token_requirements, store.wait_for_job, store.may_appear
        ),
        host=options.host,
        port=options.port,
        tls=context,
        planner=planner,
        on_answer=count_response,
        connections=ConnectionLimits(
            total=options.max_connections, per_source=options.max_connections_per_source
        ),
        on_unserved=lambda reason: REFUSED.labels(reason=reason).inc(),
        restart_handler=restart_handler,
        leads=lambda: leads,
    )

    def release_job(job: JobController, generations: JobGenerations) -> None:
        server.handler.drop_job(job)
        restart_handler.drop_job(generations)

    store.on_dropped, store.on_pods_lost = release_job, restart_handler.notify_loss
    server.handler.on_report = layouts.process_report
    serving = False

    async def warm_up_planner() -> None:
        """Start the planner processes while requests are served."""
        await planner.start_workers()
        await stop.wait()

    loop_monitor, ticked = EventLoopMonitor(), Heartbeat("rounds over all jobs", ROUND_SECONDS)

    def explain_unready() -> str:
        """Reason why this process neither leads nor can take over; empty if it does or can."""
        if not serving:
            return "its port is not open yet"
        no_leader = "" if leads or election.is_standby else "no replica leads yet"
        return informers.explain_unready() or no_leader

    http = await health_server.start(
        options.host,
        options.metrics_port,
        explain_unready,
        (loop_monitor, lambda: ticked() if leads else "", *informers.list_heartbeats()),
        lambda: "\n".join([election.describe_state(), *informers.list_problems()]),
    )

    async def serve_while_leading() -> None:
        nonlocal leads
        leads = True
        ticked.record_beat()
        try:
            async with asyncio.TaskGroup() as group:
                if label is not None:
                    group.create_task(label.maintain_label(leading))
                group.create_task(job_cache.pass_jobs_on())
                group.create_task(visit_jobs(server, store, ticked))
        finally:
            leads = False
            stop.set()
            if label is not None:
                await label.remove_label()
            # Must precede the release of the Lease, after which writes are not allowed.
            await server.handler.wait_until_persisted(PERSIST_SECONDS)

    async def run_election() -> None:
        await informers.wait_until_settled(stop)
        await election.run(serve_while_leading, stop)

    tasks = [asyncio.create_task(each.run()) for each in jobs]
    tasks += [asyncio.create_task(loop_monitor.run()), asyncio.create_task(warm_up_planner())]
    if context is not None:
        tasks.append(
            asyncio.create_task(renew_certificate(context, options.tls_cert, options.tls_key))
        )
    try:
        async with server:
            serving = True
            log.info("serving at %s", server.url)
            electing = asyncio.create_task(run_election())
            stopping = asyncio.create_task(stop.wait())
            try:
                # A background task that ends before ``stop`` has failed: exit with its error.
                await asyncio.wait(
                    [electing, *tasks, stopping], return_when=asyncio.FIRST_COMPLETED
                )
                for task in (electing, *tasks):
                    if task.done():
                        task.result()
            finally:
                stop.set()
                await asyncio.wait([electing])  # It releases the Lease.
    finally:
        for task in tasks:
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task
        layouts.close()
        await planner.close()
        await first_planner.close()
        await http.stop()


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="pipemorph-ingest", description=__doc__)
    parser.add_argument(
        "--namespace", action="append", default=[], help="serve only this namespace; repeatable"
    )
    parser.add_argument("--host", help="address to listen on (default: all)")
    parser.add_argument("--port", type=port_type, default=8443)
    parser.add_argument("--tls-cert", help="PEM file with the certificate chain")
    parser.add_argument("--tls-key", help="PEM file with its key")
    parser.add_argument(
        "--plain-http", action="store_true", help="no TLS: for tests, or behind a mesh with TLS"
    )
    parser.add_argument("--metrics-port", type=port_type, default=8081)
    add_election_options(parser)
    parser.add_argument(
        "--pods",
        metavar="SELECTOR",
        help="label selector of the pods of the ingest, in the namespace of the Lease; the pod that"
        f" leads (its name is --identity) gets the label {LABEL_LEADER} (default: no label)",
    )
    parser.add_argument(
        "--max-connections",
        type=whole_number_type(1),
        default=ConnectionLimits.total,
        help="limit of open connections; a job's agent uses two (default: %(default)s)",
    )
    parser.add_argument(
        "--max-connections-per-source",
        type=whole_number_type(1),
        default=ConnectionLimits.per_source,
        help="limit per client address; a NAT may hide all agents (default: %(default)s)",
    )
    parser.add_argument(
        "--planners",
        type=whole_number_type(1),
        default=2,
        help="planner processes that one namespace may use at a time; one more serves the others"
        " (default: %(default)s)",
    )
    return parser


def main() -> None:
    options = build_parser().parse_args()
    if options.pods is not None and not options.identity:
        build_parser().error("--pods needs --identity")
    try:
        level = read_log_level()
    except InputError as error:
        build_parser().error(str(error))
    logging.basicConfig(level=level, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    if not options.plain_http and not (options.tls_cert and options.tls_key):
        build_parser().error("give --tls-cert and --tls-key, or --plain-http")
    asyncio.run(run(options))


if __name__ == "__main__":
    main()
