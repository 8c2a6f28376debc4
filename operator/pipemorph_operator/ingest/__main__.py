"""``python -m pipemorph_operator.ingest``: the ingest process."""

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

from pipemorph.arguments import port, whole_number
from pipemorph.control import JobController
from pipemorph.control.generations import Generations
from pipemorph.errors import InputError
from pipemorph.ingest import (
    ConnectionLimits,
    FirstPlanner,
    GenerationDesk,
    IngestServer,
    PlannerPool,
    open_files_limit,
)
from pipemorph.ingest.connections import SHARE_OF_FILES
from pipemorph.log_level import log_level
from pipemorph_operator import health_server
from pipemorph_operator.cluster.client import Cluster
from pipemorph_operator.cluster.election import Election, LeaderLabel, add_options
from pipemorph_operator.cluster.informer import Informer, Informers
from pipemorph_operator.health_server import Heartbeat, LoopMonitor
from pipemorph_operator.ingest import heap
from pipemorph_operator.ingest.auth import PodTokenAuthenticator
from pipemorph_operator.ingest.moving import LayoutMoves
from pipemorph_operator.ingest.status.write_schedule import look_interval
from pipemorph_operator.ingest.store import ClusterStore, JobCache
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
"""Longest round over all jobs; a round over 10,000 jobs takes 25 s."""
CERTIFICATE_SECONDS = 60.0
"""Interval of checks of the certificate's files, which are renewed in place."""


PERSIST_SECONDS = 1.0
"""How long a leader that stops goes on writing what it has served: its Lease lasts longer."""


def certificate(options: argparse.Namespace) -> ssl.SSLContext | None:
    """TLS context from the given files; None for plain HTTP. Raises OSError or ssl.SSLError."""
    if options.plain_http:
        return None
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.load_cert_chain(options.tls_cert, options.tls_key)
    context.num_tickets = 0  # No agent resumes a session: tickets would be made for nobody.
    return context


async def renew(context: ssl.SSLContext, cert: str, key: str) -> None:
    """Reload the certificate when its files change, for new connections."""

    def stamp() -> tuple[int, int]:
        return Path(cert).stat().st_mtime_ns, Path(key).stat().st_mtime_ns

    used = stamp()
    while True:
        await asyncio.sleep(CERTIFICATE_SECONDS)
        try:
            found = stamp()
            if found != used:
                context.load_cert_chain(cert, key)
                used = found
                log.info("the certificate was renewed")
        except (OSError, ssl.SSLError) as error:
            log.error("the renewed certificate is unusable; keeping the old one: %s", error)


async def tick(server: IngestServer, store: ClusterStore, ticked: Heartbeat) -> None:
    """Visit all jobs in rounds: run their timers, and write status that is due."""
    busy: dict[tuple[str, str], asyncio.Task[None]] = {}
    clock = asyncio.get_running_loop().time
    while True:
        keys = store.keys
        ticked.beat()
        server.sweep()
        round_seconds = look_interval(len(keys))
        start = clock()
        for i, key in enumerate(keys):
            if key not in busy:
                # One task per job, so that a slow write of one job does not delay the others.
                busy[key] = task = asyncio.create_task(_look(server, store, key))
                task.add_done_callback(partial(_not_busy, busy, key))
            # Spread the jobs over the round, so that a report waits for one job at most.
            await asyncio.sleep(start + round_seconds * (i + 1) / len(keys) - clock())
        await asyncio.sleep(start + round_seconds - clock())


def _not_busy(
    busy: dict[tuple[str, str], asyncio.Task[None]], key: tuple[str, str], _: asyncio.Task[None]
) -> None:
    busy.pop(key, None)


async def _look(server: IngestServer, store: ClusterStore, key: tuple[str, str]) -> None:
    try:
        await server.handler.tick(*key)
        await store.look(key)
    except Exception:
        log.exception("%s/%s: periodic update failed", *key)


@cache
def _answers(kind: str, status: int) -> Counter:
    """The counter of a kind and status. Cached: the lookup costs more than the increment."""
    return REPORTS.labels(kind=kind, code=str(status))


def count_response(kind: str, status: int, seconds: float) -> None:
    """Count a response in the metrics."""
    _answers(kind, status).inc()
    if kind == "report":
        REPORT_SECONDS.observe(seconds)


def count_decision(waited: float, took: float) -> None:
    """Count a decision in the metrics."""
    PLAN_WAIT_SECONDS.observe(waited)
    PLAN_SECONDS.observe(took)


async def run(options: argparse.Namespace) -> None:
    """Run until SIGTERM or SIGINT, or until another process leads."""
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    async with await Cluster.configured() as cluster:
        await serve(options, cluster, stop)


async def serve(options: argparse.Namespace, cluster: Cluster, stop: asyncio.Event) -> None:
    """Stand by, and lead once elected, until ``stop`` is set. Sets it when another process leads:
    what this one knows of jobs is out of date then, and its container starts again as a standby."""
    context = certificate(options)
    wanted = SHARE_OF_FILES * options.max_connections
    if (files := open_files_limit(wanted)) < wanted:
        log.warning(
            "this process may open %d files: it accepts a third of that in connections, not"
            " --max-connections=%d; raise the limit of open files of the container runtime to %d",
            files, options.max_connections, wanted,
        )  # fmt: skip
    first = FirstPlanner(limit_seconds=FIRST_PLAN_SECONDS)
    # An API server that is away stops writes, and not adaptation.
    election = Election.configured(cluster, options, INGEST_OWNER, outlasts_renewals=True)
    leading = cluster.permitted(election.permit)
    store = ClusterStore(leading, first_plan=first, term=lambda: election.term)
    job_cache = JobCache(store)
    jobs = [
        Informer(cluster, KIND, job_cache.changed, namespace=namespace)
        for namespace in options.namespace or [None]
    ]
    informers = Informers(jobs)
    store.is_listed = informers.listed
    label: LeaderLabel | None = None
    if options.pods is not None:
        namespace, _ = options.lease
        label = LeaderLabel(cluster, namespace, options.identity, options.pods, owner=INGEST_OWNER)
    planner = PlannerPool(options.planners, on_decided=count_decision)
    PLANS_WAITING.set_function(lambda: planner.waiting)
    leads = False
    desk = GenerationDesk(store)
    layouts = LayoutMoves(store.moving, desk, planner.search)
    server = IngestServer(
        store,
        PodTokenAuthenticator(cluster, store.expected, store.arrival, store.may_come),
        host=options.host,
        port=options.port,
        tls=context,
        planner=planner,
        on_answer=count_response,
        connections=ConnectionLimits(
            in_all=options.max_connections, per_source=options.max_connections_per_source
        ),
        on_unserved=lambda reason: REFUSED.labels(reason=reason).inc(),
        desk=desk,
        leads=lambda: leads,
    )

    def dropped(job: JobController, generations: Generations) -> None:
        server.handler.dropped(job)
        desk.dropped(generations)

    store.on_dropped, store.on_lost = dropped, desk.hurry
    server.handler.on_taken = layouts.reported
    serving = False

    async def warm_up() -> None:
        """Beside what is served: agents need their answers before another plan."""
        await planner.warm_up()
        await stop.wait()

    loop_monitor, ticked = LoopMonitor(), Heartbeat("rounds over all jobs", ROUND_SECONDS)

    def unready() -> str:
        """Why it neither leads nor can as soon as the one that leads does not."""
        if not serving:
            return "its port is not open yet"
        return informers.unready() or ("" if leads or election.stands_by else "nobody leads yet")

    http = await health_server.start(
        options.host,
        options.metrics_port,
        unready,
        (loop_monitor, lambda: ticked() if leads else "", *informers.checks()),
        lambda: "\n".join([election.state(), *informers.problems()]),
    )

    async def lead() -> None:
        nonlocal leads
        leads = True
        ticked.beat()
        try:
            async with asyncio.TaskGroup() as group:
                if label is not None:
                    group.create_task(label.hold(leading))
                group.create_task(job_cache.lead())
                group.create_task(tick(server, store, ticked))
                group.create_task(heap.freeze(lambda: len(store.keys)))
        finally:
            leads = False
            stop.set()
            if label is not None:
                await label.remove()
            # Before the Lease is released, and with it the right to write.
            await server.handler.persisted(PERSIST_SECONDS)

    async def elect() -> None:
        await informers.settle(stop)
        await election.run(lead, stop)

    tasks = [asyncio.create_task(each.run()) for each in jobs]
    tasks += [asyncio.create_task(loop_monitor.run()), asyncio.create_task(warm_up())]
    if context is not None:
        tasks.append(asyncio.create_task(renew(context, options.tls_cert, options.tls_key)))
    try:
        async with server:
            serving = True
            log.info("serving at %s", server.url)
            electing = asyncio.create_task(elect())
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
        await first.close()
        await http.cleanup()


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(prog="pipemorph-ingest", description=__doc__)
    made.add_argument(
        "--namespace", action="append", default=[], help="serve only this namespace; repeatable"
    )
    made.add_argument("--host", help="address to listen on (default: all)")
    made.add_argument("--port", type=port, default=8443)
    made.add_argument("--tls-cert", help="PEM file with the certificate chain")
    made.add_argument("--tls-key", help="PEM file with its key")
    made.add_argument(
        "--plain-http", action="store_true", help="no TLS: for tests, or behind a mesh with TLS"
    )
    made.add_argument("--metrics-port", type=port, default=8081)
    add_options(made)
    made.add_argument(
        "--pods",
        metavar="SELECTOR",
        help="label selector of the pods of the ingest, in the namespace of the Lease; the pod that"
        f" leads, which --identity names, gets the label {LABEL_LEADER} (default: no label)",
    )
    made.add_argument(
        "--max-connections",
        type=whole_number(1),
        default=ConnectionLimits.in_all,
        help="limit of open connections; a job's agent uses two (default: %(default)s)",
    )
    made.add_argument(
        "--max-connections-per-source",
        type=whole_number(1),
        default=ConnectionLimits.per_source,
        help="limit per client address; a NAT may hide all agents (default: %(default)s)",
    )
    made.add_argument(
        "--planners",
        type=whole_number(1),
        default=2,
        help="processes that plan for one namespace at a time; one more plans for the others"
        " (default: %(default)s)",
    )
    return made


def main() -> None:
    options = parser().parse_args()
    if options.pods is not None and not options.identity:
        parser().error("--pods needs --identity")
    try:
        level = log_level()
    except InputError as error:
        parser().error(str(error))
    logging.basicConfig(level=level, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    if not options.plain_http and not (options.tls_cert and options.tls_key):
        parser().error("give --tls-cert and --tls-key, or --plain-http")
    asyncio.run(run(options))


if __name__ == "__main__":
    main()
