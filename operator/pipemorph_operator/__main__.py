"""``python -m pipemorph_operator``: the reconciling process."""

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

from pipemorph.arguments import port, whole_number
from pipemorph.errors import InputError
from pipemorph.ingest import FirstPlanner
from pipemorph.log_level import log_level
from pipemorph_operator import health_server, names
from pipemorph_operator.cluster.client import REQUEST_ERRORS, ApiRefused, Cluster, path, reason_of
from pipemorph_operator.cluster.election import Election, add_options
from pipemorph_operator.cluster.facts import JobFacts
from pipemorph_operator.cluster.informer import Informer, Informers
from pipemorph_operator.config import OperatorConfig
from pipemorph_operator.health_server import Heartbeat, LoopMonitor
from pipemorph_operator.metrics import RECONCILES
from pipemorph_operator.names import KIND, LABEL_JOB
from pipemorph_operator.reconcile.owned_jobs import FailedPods, OwnedJobs
from pipemorph_operator.reconcile.plans import LIMIT_SECONDS, Plans
from pipemorph_operator.reconcile.reconciler import Reconciler
from pipemorph_operator.reconcile.watches import LOOK_SECONDS, Key, Watched, watch
from pipemorph_operator.reconcile.workqueue import WorkQueue

log = logging.getLogger("pipemorph.operator")

WORKERS = 16
GAP_SECONDS = 0.25
"""Minimum time between two reconciles of a job, so that 1000 starting pods cause only a few."""
KOPF_SECONDS = 5.0
"""Longest wait for kopf to end, which takes a second."""
RESYNC_LOOKS = 5
"""Every fifth resync reconciles all jobs, in case a watch missed a change."""


async def work(queue: WorkQueue[Key], reconciler: Reconciler) -> None:
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
            log.warning("%s/%s: will retry: %s", *key, reason_of(error))
        except Exception:
            # An unexpected error in one job must not stop the others.
            log.exception("%s/%s: reconcile failed", *key)
        finally:
            # Also if it was cancelled, because this process does not lead any more.
            queue.done(key, failed=failed)
        RECONCILES.labels(result="error" if failed else "ok").observe(time.monotonic() - started)
        if again is not None and not failed:
            queue.add_after(key, max(again, GAP_SECONDS))


async def lead(
    queue: WorkQueue[Key],
    reconciler: Reconciler,
    jobs: Callable[[], list[Key]],
    workers: int,
) -> None:
    """Reconcile all ``jobs``, then those that change, until cancelled."""
    # An earlier leader may have ended in the middle of a reconcile, or waiting for its next.
    queue.open(jobs())
    try:
        async with asyncio.TaskGroup() as group:
            for _ in range(workers):
                group.create_task(work(queue, reconciler))
    finally:
        queue.close()
        reconciler.accusations.clear()  # The next leader holds its own.


async def resync(
    queue: WorkQueue[Key],
    cluster: Cluster,
    namespaces: Sequence[str | None],
    watched: Watched,
    looked: Heartbeat,
) -> None:
    """Queue jobs whose changes kopf's watch has missed, and periodically all jobs."""
    for look in count(1):
        await asyncio.sleep(LOOK_SECONDS)
        looked.beat()
        listed: list[dict[str, Any]] = []
        refused: set[str] = set()
        for namespace in namespaces:
            try:
                listed += [m async for m in cluster.metadata(path(KIND, namespace))]
            except REQUEST_ERRORS as error:
                where = f"the jobs of namespace {namespace}" if namespace else "the jobs"
                log.warning("resync could not list %s: %s", where, reason_of(error))
                refused.add(namespace or "")
                if namespace is None or not isinstance(error, ApiRefused):
                    break  # Not an error of one namespace.
        else:
            keys = watched.look(listed, refused)
            if look % RESYNC_LOOKS == 0:
                keys |= {(m["namespace"], m["name"]) for m in listed}
            for key in keys:
                queue.add(key)


def _end(stop: asyncio.Event, task: asyncio.Task[None]) -> None:
    """Stop the process when a task fails: it cannot work without that task."""
    error = None if task.cancelled() else task.exception()
    if error is not None:
        log.error("a background task failed; exiting", exc_info=error)
        stop.set()


async def run(options: argparse.Namespace) -> None:
    """Run until SIGTERM or SIGINT."""

    def config() -> OperatorConfig:
        # The CA file is renewed in place; each new attempt reads its current content.
        return OperatorConfig(
            ingest_url=options.ingest_url,
            ca_pem=Path(options.ingest_ca).read_text() if options.ingest_ca else "",
            trainer_image=options.trainer_image,
            trainer_pull_policy=options.trainer_pull_policy,
            network_policies=options.network_policies,
            metrics_from=options.metrics_from,
        )

    config()  # Fail at start, with the file's name, if the CA file is missing.
    queue: WorkQueue[Key] = WorkQueue(gap=GAP_SECONDS)
    watched, owned, failed = Watched(), OwnedJobs(queue), FailedPods(queue)
    everywhere: list[str | None] = [None]
    namespaces = options.namespace or everywhere
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    async with await Cluster.configured() as cluster:
        planner = FirstPlanner(limit_seconds=LIMIT_SECONDS)
        plans = Plans(planner, queue.add)
        election = Election.configured(cluster, options, names.OPERATOR_OWNER)
        pods = partial(Informer, label=failed.LABELS, fields=failed.FIELDS)
        all_informers = [
            informer
            for namespace in namespaces
            for informer in (
                Informer(cluster, "Job", owned.changed, namespace=namespace, label=LABEL_JOB),
                pods(cluster, "Pod", failed.changed, namespace=namespace),
            )
        ]
        informers = Informers(all_informers)

        def jobs_of(namespace: str, uid: str) -> Sequence[JobFacts]:
            if not informers.listed(namespace):
                raise ConnectionError(f"not everything in namespace {namespace} is listed")
            return owned.jobs(namespace, uid)

        leading = cluster.permitted(election.permit)
        reconciler = Reconciler(leading, config, jobs_of, plans, failed.any_of)
        queue.close()

        async def elect() -> None:
            await informers.settle(stop)
            await election.run(
                partial(lead, queue, reconciler, watched.jobs, options.workers), stop
            )

        def problems() -> list[str]:
            return [*watched.refused.values(), *informers.problems()]

        loop_monitor, looked = LoopMonitor(), Heartbeat("checks of the watch", 5 * LOOK_SECONDS)
        http = await health_server.start(
            options.host,
            options.metrics_port,
            lambda: (
                informers.unready()
                or watched.unready()
                or ("" if election.known else "the Lease is not read yet")
            ),
            (loop_monitor, looked, queue.overdue, watched.trouble, *informers.checks()),
            lambda: "\n".join([election.state(), *problems()]),
        )
        electing = asyncio.create_task(elect())
        watching = [
            asyncio.create_task(watch(each, queue, watched, cluster, stop)) for each in namespaces
        ]
        tasks = [*watching, *(asyncio.create_task(each.run()) for each in all_informers)]
        tasks.append(asyncio.create_task(resync(queue, cluster, namespaces, watched, looked)))
        tasks.append(asyncio.create_task(loop_monitor.run()))
        for task in (electing, *tasks):
            task.add_done_callback(partial(_end, stop))
        try:
            await stop.wait()
        finally:
            stop.set()
            await asyncio.wait([electing])  # It releases the Lease.
            # Their threads use this event loop.
            await asyncio.wait(watching, timeout=KOPF_SECONDS)
            for task in tasks:
                task.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await task
            await plans.close()
            await planner.close()
            await http.cleanup()


def parser() -> argparse.ArgumentParser:
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
        type=_peers,
        default=(),
        metavar="JSON",
        help="who may read ranks' metrics under it, a list of NetworkPolicyPeer (default: anybody)",
    )
    made.add_argument("--host", help="address of metrics and probes (default: all)")
    made.add_argument("--metrics-port", type=port, default=8080)
    add_options(made)
    made.add_argument(
        "--workers", type=whole_number(1), default=WORKERS, help="jobs reconciled concurrently"
    )
    return made


def _peers(text: str) -> tuple[dict[str, Any], ...]:
    try:
        found = json.loads(text)
    except ValueError:
        found = None
    if not isinstance(found, list) or not all(isinstance(peer, dict) for peer in found):
        raise argparse.ArgumentTypeError(f"{text!r} is not a JSON list of objects")
    return tuple(found)


def main() -> None:
    options = parser().parse_args()
    try:
        level = log_level()
    except InputError as error:
        parser().error(str(error))
    logging.basicConfig(level=level, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    logging.getLogger("kopf").setLevel(logging.WARNING)
    asyncio.run(run(options))


if __name__ == "__main__":
    main()
