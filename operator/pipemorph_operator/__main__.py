"""``python -m pipemorph_operator``: the reconciling process.

kopf watches PipeMorphJobs, and informers watch their Jobs and failed pods: every change queues the
job. The replica that holds the Lease reconciles queued jobs; the others stand by. A periodic list
queues jobs whose changes the watch has missed.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import logging
import signal
import time
from collections.abc import Callable, Sequence
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

from pipemorph.argument_types import port_type, whole_number_type
from pipemorph.errors import InputError
from pipemorph.ingest import FirstPlanner
from pipemorph.log_level import read_log_level
from pipemorph_operator import health_server, names
from pipemorph_operator.config import OperatorConfig
from pipemorph_operator.health_server import EventLoopMonitor, Heartbeat
from pipemorph_operator.kube.client import (
    REQUEST_ERRORS,
    KubeApiError,
    KubeClient,
    build_path,
    describe_error,
)
from pipemorph_operator.kube.election import LeaderElection, add_election_options
from pipemorph_operator.kube.informer import Informer, InformerGroup
from pipemorph_operator.kube.object_facts import JobFacts
from pipemorph_operator.metrics import RECONCILES
from pipemorph_operator.names import KIND, LABEL_JOB
from pipemorph_operator.reconcile.job_watch import COMPARE_SECONDS, Key, WatchedJobs, watch_jobs
from pipemorph_operator.reconcile.owned_jobs import FailedPods, OwnedJobs
from pipemorph_operator.reconcile.plan_checks import LIMIT_SECONDS, PlanChecker
from pipemorph_operator.reconcile.reconciler import Reconciler
from pipemorph_operator.reconcile.workqueue import WorkQueue

log = logging.getLogger("pipemorph.operator")

WORKERS = 16
GAP_SECONDS = 0.25
"""Minimum time between two reconciles of a job, so that 1000 starting pods cause only a few."""
KOPF_SECONDS = 5.0
"""Longest wait for kopf to end, which takes a second."""
RESYNC_LOOKS = 5
"""Resyncs per full resync, which reconciles all jobs in case a watch missed a change."""


async def run_worker(queue: WorkQueue[Key], reconciler: Reconciler) -> None:
    """Reconcile jobs from the queue, forever."""
    while True:
        key = await queue.get()
        started = time.monotonic()
        failed = True
        again: float | None = None
        try:
            again = await reconciler.reconcile(*key)
            failed = False
        except REQUEST_ERRORS as error:
            log.warning("%s/%s: will retry: %s", *key, describe_error(error))
        except Exception:
            # An unexpected error in one job must not stop the others.
            log.exception("%s/%s: reconcile failed", *key)
        finally:
            # Runs also on cancellation, when this process loses its Lease.
            queue.done(key, failed=failed)
        RECONCILES.labels(result="error" if failed else "ok").observe(time.monotonic() - started)
        if again is not None and not failed:
            queue.add_after(key, max(again, GAP_SECONDS))


async def reconcile_while_leading(
    queue: WorkQueue[Key],
    reconciler: Reconciler,
    jobs: Callable[[], list[Key]],
    workers: int,
) -> None:
    """Reconcile all ``jobs``, then those that change, until cancelled."""
    # An earlier leader may have ended during a reconcile, or before one that it had scheduled.
    queue.open(jobs())
    try:
        async with asyncio.TaskGroup() as group:
            for _ in range(workers):
                group.create_task(run_worker(queue, reconciler))
    finally:
        queue.close()
        reconciler.accusations.clear()  # The next leader collects its own.


async def resync_jobs(
    queue: WorkQueue[Key],
    cluster: KubeClient,
    namespaces: Sequence[str | None],
    watched: WatchedJobs,
    looked: Heartbeat,
) -> None:
    """Queue jobs whose changes kopf's watch has missed, and periodically all jobs."""
    for look in count(1):
        await asyncio.sleep(COMPARE_SECONDS)
        looked.record_beat()
        listed: list[dict[str, Any]] = []
        refused: set[str] = set()
        for namespace in namespaces:
            try:
                listed += [m async for m in cluster.list_metadata(build_path(KIND, namespace))]
            except REQUEST_ERRORS as error:
                where = f"the jobs of namespace {namespace}" if namespace else "the jobs"
                log.warning("resync could not list %s: %s", where, describe_error(error))
                refused.add(namespace or "")
                if namespace is None or not isinstance(error, KubeApiError):
                    break  # The error concerns all namespaces.
        else:
            keys = watched.compare_with_list(listed, refused)
            if look % RESYNC_LOOKS == 0:
                keys |= {(m["namespace"], m["name"]) for m in listed}
            for key in keys:
                queue.add(key)


def _stop_on_failure(stop: asyncio.Event, task: asyncio.Task[None]) -> None:
    """Stop the process if a background task fails: it cannot work without that task."""
    error = None if task.cancelled() else task.exception()
    if error is not None:
        log.error("a background task failed; exiting", exc_info=error)
        stop.set()


async def run(options: argparse.Namespace) -> None:
    """Run the operator until SIGTERM or SIGINT."""

    def read_config() -> OperatorConfig:
        # The CA file is renewed in place; each new attempt reads its current content.
        return OperatorConfig(
            ingest_url=options.ingest_url,
            ca_pem=Path(options.ingest_ca).read_text() if options.ingest_ca else "",
            trainer_image=options.trainer_image,
            trainer_pull_policy=options.trainer_pull_policy,
            network_policies=options.network_policies,
            metrics_from=options.metrics_from,
        )

    read_config()  # Fail at start, with the file's name, if the CA file is missing.
    queue: WorkQueue[Key] = WorkQueue(gap=GAP_SECONDS)
    watched, owned, failed = WatchedJobs(), OwnedJobs(queue), FailedPods(queue)
    everywhere: list[str | None] = [None]
    namespaces = options.namespace or everywhere
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    async with await KubeClient.from_environment() as cluster:
        planner = FirstPlanner(limit_seconds=LIMIT_SECONDS)
        plans = PlanChecker(planner, queue.add)
        election = LeaderElection.from_options(cluster, options, names.OPERATOR_OWNER)
        pods = partial(Informer, label=failed.LABELS, fields=failed.FIELDS)
        all_informers = [
            informer
            for namespace in namespaces
            for informer in (
                Informer(
                    cluster, "Job", owned.process_change, namespace=namespace, label=LABEL_JOB
                ),
                pods(cluster, "Pod", failed.process_change, namespace=namespace),
            )
        ]
        informers = InformerGroup(all_informers)

        def find_owned_jobs(namespace: str, uid: str) -> Sequence[JobFacts]:
            if not informers.is_listed(namespace):
                raise ConnectionError(f"not everything in namespace {namespace} is listed")
            return owned.find_jobs(namespace, uid)

        leading = cluster.with_write_permit(election.remaining_write_seconds)
        reconciler = Reconciler(
            leading, read_config, find_owned_jobs, plans, failed.has_failed_pods
        )
        queue.close()

        async def run_election() -> None:
            await informers.wait_until_settled(stop)
            await election.run(
                partial(
                    reconcile_while_leading, queue, reconciler, watched.list_jobs, options.workers
                ),
                stop,
            )

        def list_problems() -> list[str]:
            return [*watched.refused.values(), *informers.list_problems()]

        loop_monitor, looked = (
            EventLoopMonitor(),
            Heartbeat("checks of the watch", 5 * COMPARE_SECONDS),
        )
        http = await health_server.start(
            options.host,
            options.metrics_port,
            lambda: (
                informers.explain_unready()
                or watched.explain_unready()
                or ("" if election.has_read_lease else "the Lease is not read yet")
            ),
            (
                loop_monitor,
                looked,
                queue.describe_overdue,
                watched.describe_problem,
                *informers.list_heartbeats(),
            ),
            lambda: "\n".join([election.describe_state(), *list_problems()]),
        )
        electing = asyncio.create_task(run_election())
        watching = [
            asyncio.create_task(watch_jobs(each, queue, watched, cluster, stop))
            for each in namespaces
        ]
        tasks = [*watching, *(asyncio.create_task(each.run()) for each in all_informers)]
        tasks.append(asyncio.create_task(resync_jobs(queue, cluster, namespaces, watched, looked)))
        tasks.append(asyncio.create_task(loop_monitor.run()))
        for task in (electing, *tasks):
            task.add_done_callback(partial(_stop_on_failure, stop))
        try:
            await stop.wait()
        finally:
            stop.set()
            await asyncio.wait([electing])  # It releases the Lease.
            # The threads of kopf use this event loop.
            await asyncio.wait(watching, timeout=KOPF_SECONDS)
            for task in tasks:
                task.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await task
            await plans.close()
            await planner.close()
            await http.stop()


def build_parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(prog="pipemorph-operator", description=__doc__)
    made.add_argument(
        "--namespace", action="append", default=[], help="serve only this namespace; repeatable"
    )
    made.add_argument("--ingest-url", required=True, help="URL of the ingest, as ranks reach it")
    made.add_argument("--ingest-ca", help="PEM file with the CA of the ingest's certificate")
    made.add_argument("--trainer-image", default="", help="default image of trainer containers")
    made.add_argument("--trainer-pull-policy", default="", help="pull policy of that image")
    made.add_argument(
        "--network-policies",
        action="store_true",
        help="make a NetworkPolicy for each job: only its ranks reach each other",
    )
    made.add_argument(
        "--metrics-from",
        type=_parse_peers,
        default=(),
        metavar="JSON",
        help="peers that may read ranks' metrics: a list of NetworkPolicyPeer (default: all)",
    )
    made.add_argument("--host", help="address of metrics and probes (default: all)")
    made.add_argument("--metrics-port", type=port_type, default=8080)
    add_election_options(made)
    made.add_argument(
        "--workers", type=whole_number_type(1), default=WORKERS, help="jobs reconciled concurrently"
    )
    return made


def _parse_peers(text: str) -> tuple[dict[str, Any], ...]:
    try:
        found = json.loads(text)
    except ValueError:
        found = None
    if not isinstance(found, list) or not all(isinstance(peer, dict) for peer in found):
        raise argparse.ArgumentTypeError(f"{text!r} is not a JSON list of objects")
    return tuple(found)


def main() -> None:
    options = build_parser().parse_args()
    try:
        level = read_log_level()
    except InputError as error:
        build_parser().error(str(error))
    logging.basicConfig(level=level, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    logging.getLogger("kopf").setLevel(logging.WARNING)
    asyncio.run(run(options))


if __name__ == "__main__":
    main()
