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

from pipemorph.control.observe.observer import Observer
from pipemorph.errors import InputError
from pipemorph.log_level import log_level
from pipemorph.wire import Directive
from pipemorph.wire.ranks import RankReport
from pipemorph_trainer.agent.launch import AgentConfig
from pipemorph_trainer.agent.ops import OpsCollector
from pipemorph_trainer.agent.page_feed import PageServer
from pipemorph_trainer.agent.ranks import RankServer
from pipemorph_trainer.agent.uplink import Uplink

LAST_REPORT_SECONDS = 2.0
LAST_WORDS_SECONDS = 0.5
"""Time for the other ranks to report that they have finished, too."""
LAST_RESORT_SECONDS = 10
PR_SET_PDEATHSIG = 1

log = logging.getLogger("pipemorph.agent")


async def serve(config: AgentConfig) -> None:
    """Serve the ranks and report to the ingest until rank 0 ends, then send the last report."""
    observer = Observer(
        config.mesh, job=config.job, namespace=config.namespace, attempt=config.attempt
    )

    # The first agent reports at once that the ranks are starting. From a later agent that would be
    # wrong: it waits until rank 0 has sent the state of training.
    informed = asyncio.Event()
    if not config.again:
        informed.set()

    def on_report(report: RankReport) -> None:
        observer.hear(report, time.time())
        uplink.notify()
        now = time.monotonic()
        if report.ops is not None:
            collector.take(report.ops, now)
        if report.rank == 0:
            informed.set()
            done = report.finished_iteration
            collector.progress(report.iteration, done.seconds if done else None, now)

    def on_connected(rank: int) -> None:
        observer.connect(rank)
        answer()

    def answer() -> None:
        for them, found in observer.answers(ranks.connected):
            ranks.answer(them, found)

    async def report() -> None:
        await informed.wait()
        await uplink.run()

    # One after the other, so that a plan never overtakes a later one.
    directives: asyncio.Queue[Directive] = asyncio.Queue()

    async def hand_out() -> None:
        while True:
            directive = await directives.get()
            version = directive.plan_version
            try:
                await ranks.broadcast(directive)
            except InputError as error:
                log.warning("plan v%d refused: %s", version, error)
                observer.say(f"plan {version} refused: {error}")
                uplink.notify()
                continue
            log.info(
                "plan v%d to %d ranks %.0f ms after it was issued: %s",
                version, len(ranks.connected),
                max(0.0, 1e3 * (time.time() - directive.issued_at)), directive.reason,
            )  # fmt: skip

    def on_directive(directive: Directive) -> None:
        directives.put_nowait(directive)
        show_plan()

    def show_plan() -> None:
        if page is not None and (message := uplink.message()) is not None:
            page.plan(message)

    def on_page() -> None:
        show_plan()
        observer.repeat_states()
        uplink.observed()

    ranks = RankServer(bytes.fromhex(config.secret_hex), config.mesh, on_connected, on_report)
    uplink = Uplink(
        base_url=config.ingest_url,
        namespace=config.namespace,
        job=config.job,
        attempt=config.attempt,
        token_file=config.token_file,
        observer=observer,
        on_directive=on_directive,
        on_observed=answer,
        on_report=lambda report: page.report(report) if page is not None else None,
    )
    page = PageServer.from_env(
        os.environ,
        config.attempt,
        on_wanted=lambda wanted: collector.wanted(wanted, time.monotonic()),
        on_connected=on_page,
    )
    collector = OpsCollector(
        config.mesh, ranks.ask_ops, lambda ops: page.ops(ops) if page is not None else None
    )
    if page is not None:
        await page.start()
    await ranks.start(socket.socket(fileno=config.listen_fd))
    working = [asyncio.create_task(report()), asyncio.create_task(hand_out())]
    await _rank_zero_is_gone()
    signal.alarm(LAST_RESORT_SECONDS)
    for task in working:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
    sent = informed.is_set() and await uplink.flush(LAST_REPORT_SECONDS)
    await ranks.close(LAST_WORDS_SECONDS)
    if informed.is_set() and (uplink.has_news or not sent):
        await uplink.flush(LAST_REPORT_SECONDS)
    if page is not None:
        await page.close()


async def _rank_zero_is_gone() -> None:
    """Return when standard input closes, or on SIGTERM (see also :func:`_die_with`)."""
    loop = asyncio.get_running_loop()
    gone = asyncio.Event()
    loop.add_signal_handler(signal.SIGTERM, gone.set)

    def read() -> None:
        if not os.read(sys.stdin.fileno(), 4096):
            loop.remove_reader(sys.stdin.fileno())
            gone.set()

    loop.add_reader(sys.stdin.fileno(), read)
    await gone.wait()


def _read_config() -> AgentConfig:
    line = b""
    while not line.endswith(b"\n"):
        byte = os.read(sys.stdin.fileno(), 1)
        if not byte:
            raise SystemExit("pipemorph agent: rank 0 ended before it sent the configuration")
        line += byte
    return AgentConfig.model_validate_json(line)


def _die_with(parent: int) -> None:
    """Ask the kernel for SIGTERM when ``parent`` dies: a forked child of rank 0 may keep the other
    end of our standard input open longer."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != parent:
        raise SystemExit("pipemorph agent: rank 0 is gone")


def main() -> None:
    try:
        level = log_level()
    except InputError as error:
        raise SystemExit(f"pipemorph agent: {error}") from None
    logging.basicConfig(level=level, format="%(asctime)s agent: %(message)s", stream=sys.stderr)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Rank 0 handles Ctrl-C; EOF follows.
    config = _read_config()
    _die_with(config.parent)
    asyncio.run(serve(config))


if __name__ == "__main__":
    main()
