"""``python -m pipemorph_trainer.agent``: the agent process, which rank 0 starts.

It reads its :class:`AgentConfig` as one line from standard input, and ends when standard input
closes.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import logging
import os
import signal
import socket
import sys
import time
from collections import OrderedDict

from pipemorph.detection.job_observer import JobObserver
from pipemorph.diagnose.analysis.idle_time import attribute_idle_time
from pipemorph.errors import InputError
from pipemorph.log_level import read_log_level
from pipemorph.protocol import Directive, OpsTrace
from pipemorph.protocol.rank_messages import RankReport
from pipemorph.protocol.samples import IdleSeconds
from pipemorph_trainer.agent.agent_process import AgentConfig
from pipemorph_trainer.agent.ingest_client import IngestClient
from pipemorph_trainer.agent.ops_collector import OpsCollector
from pipemorph_trainer.agent.page_feed import PageFeedServer
from pipemorph_trainer.agent.rank_server import RankServer

LAST_REPORT_SECONDS = 2.0
FINAL_REPORTS_SECONDS = 0.5
"""Time for the other ranks to report that they have finished."""
FORCED_EXIT_SECONDS = 10
MOST_SAMPLED = 64
PR_SET_PDEATHSIG = 1

log = logging.getLogger("pipemorph.agent")


async def run_agent(config: AgentConfig) -> None:
    """Serve the ranks and report to the ingest until rank 0 ends, then send the last report."""
    observer = JobObserver(
        config.mesh, job=config.job, namespace=config.namespace, attempt=config.attempt
    )

    # The first agent reports at once that the ranks are starting. A restarted agent waits for the
    # state of training from rank 0.
    informed = asyncio.Event()
    if not config.is_restarted:
        informed.set()

    def on_report(report: RankReport) -> None:
        now, done = time.monotonic(), report.finished_iteration
        if report.ops is not None:
            collector.record_ops(report.ops, now)
        if done is not None and done.index in idle:
            done = done.model_copy(update={"idle": idle[done.index]})
            report = report.model_copy(update={"finished_iteration": done})
        observer.process_report(report, time.time())
        uplink.schedule_observation()
        if report.rank == 0:
            informed.set()
            collector.record_progress(report.iteration, done.seconds if done else None, now)

    # Newest iterations whose ops were sampled: rank 0 reports each later, and maybe again.
    idle: OrderedDict[int, IdleSeconds] = OrderedDict()

    def on_job_ops(traces: list[OpsTrace]) -> None:
        if (found := attribute_idle_time(traces)) is not None:
            idle[traces[0].iteration] = found
        if len(idle) > MOST_SAMPLED:
            idle.popitem(last=False)

    def on_connected(rank: int) -> None:
        observer.record_connection(rank)
        send_answers()

    def send_answers() -> None:
        for receivers, found in observer.take_answers(ranks.connected_ranks):
            ranks.send_answer(receivers, found)

    async def report_to_ingest() -> None:
        await informed.wait()
        await uplink.run()

    # Directives are sent in order, so that no plan overtakes a newer one.
    directives: asyncio.Queue[Directive] = asyncio.Queue()

    async def broadcast_plans() -> None:
        while True:
            directive = await directives.get()
            version = directive.plan_version
            try:
                await ranks.broadcast_plan(directive)
            except InputError as error:
                log.warning("plan v%d refused: %s", version, error)
                observer.report_message(f"plan {version} refused: {error}")
                uplink.schedule_observation()
                continue
            log.info(
                "plan v%d to %d ranks %.0f ms after it was issued: %s",
                version, len(ranks.connected_ranks),
                max(0.0, 1e3 * (time.time() - directive.issued_at)), directive.reason,
            )  # fmt: skip

    def on_directive(directive: Directive) -> None:
        directives.put_nowait(directive)
        send_plan_to_page()

    def send_plan_to_page() -> None:
        if page is not None and (message := uplink.make_snapshot_message()) is not None:
            page.send_plan(message)

    def on_page_connected() -> None:
        send_plan_to_page()
        observer.repeat_states()
        uplink.report_if_due()

    ranks = RankServer(bytes.fromhex(config.secret_hex), config.mesh, on_connected, on_report)
    uplink = IngestClient(
        base_url=config.ingest_url,
        namespace=config.namespace,
        job=config.job,
        attempt=config.attempt,
        token_file=config.token_file,
        observer=observer,
        on_directive=on_directive,
        on_observed=send_answers,
        on_report=lambda report: page.send_report(report) if page is not None else None,
    )
    page = PageFeedServer.from_env(
        os.environ,
        config.attempt,
        on_wanted=lambda wanted: collector.extend_watch(wanted, time.monotonic()),
        on_connected=on_page_connected,
    )
    collector = OpsCollector(
        config.mesh,
        ranks.request_ops,
        lambda ops: page.send_ops(ops) if page is not None else None,
        on_job_ops,
    )
    if page is not None:
        await page.start()
    await ranks.start(socket.socket(fileno=config.listen_fd))
    working = [asyncio.create_task(report_to_ingest()), asyncio.create_task(broadcast_plans())]
    await _wait_for_rank_zero_exit()
    signal.alarm(FORCED_EXIT_SECONDS)
    for task in working:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
    sent = informed.is_set() and await uplink.flush_reports(LAST_REPORT_SECONDS)
    await ranks.close(FINAL_REPORTS_SECONDS)
    if informed.is_set() and (uplink.has_unsent_changes or not sent):
        await uplink.flush_reports(LAST_REPORT_SECONDS)
    if page is not None:
        await page.close()


async def _wait_for_rank_zero_exit() -> None:
    """Wait until standard input closes or SIGTERM arrives (see :func:`_exit_with_parent`)."""
    loop = asyncio.get_running_loop()
    gone = asyncio.Event()
    loop.add_signal_handler(signal.SIGTERM, gone.set)

    def stop_at_end_of_input() -> None:
        if not os.read(sys.stdin.fileno(), 4096):
            loop.remove_reader(sys.stdin.fileno())
            gone.set()

    loop.add_reader(sys.stdin.fileno(), stop_at_end_of_input)
    await gone.wait()


def _read_config() -> AgentConfig:
    line = b""
    while not line.endswith(b"\n"):
        byte = os.read(sys.stdin.fileno(), 1)
        if not byte:
            raise SystemExit("pipemorph agent: rank 0 ended before it sent the configuration")
        line += byte
    return AgentConfig.model_validate_json(line)


def _exit_with_parent(parent: int) -> None:
    """Request SIGTERM from the kernel when ``parent`` dies: a forked child of rank 0 may hold the
    other end of standard input open longer."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != parent:
        raise SystemExit("pipemorph agent: rank 0 is gone")


def main() -> None:
    try:
        level = read_log_level()
    except InputError as error:
        raise SystemExit(f"pipemorph agent: {error}") from None
    logging.basicConfig(level=level, format="%(asctime)s agent: %(message)s", stream=sys.stderr)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Rank 0 handles Ctrl-C; EOF follows.
    config = _read_config()
    _exit_with_parent(config.parent)
    asyncio.run(run_agent(config))


if __name__ == "__main__":
    main()
