"""``python -m pipemorph_trainer.agent``: the agent process, which rank 0 starts; and in a job
of several parts, each of some ranks, the first rank of each part for that part.

It reads its :class:`AgentConfig` as one line from standard input, and ends when standard input
closes.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import logging
import os
import secrets
import signal
import socket
import sys
import time

from pipemorph.control.observe.observer import Observer
from pipemorph.errors import InputError
from pipemorph.log_level import log_level
from pipemorph.wire import Directive
from pipemorph_trainer.agent.launch import AgentConfig
from pipemorph_trainer.agent.merge import TelemetryMerger
from pipemorph_trainer.agent.messages import RankTelemetry
from pipemorph_trainer.agent.ops import OpsCollector
from pipemorph_trainer.agent.page_feed import PageServer
from pipemorph_trainer.agent.parts import PartLines
from pipemorph_trainer.agent.ranks import RankServer
from pipemorph_trainer.agent.uplinks.to_agent import PartUplink
from pipemorph_trainer.agent.uplinks.to_ingest import Uplink

LAST_REPORT_SECONDS = 2.0
LAST_WORDS_SECONDS = 0.5
"""Time for the other ranks to report that they have finished, too."""
LAST_PARTS_SECONDS = 1.5
"""Time for the agents of parts, of which each gives its ranks that time first."""
LAST_RESORT_SECONDS = 10
PR_SET_PDEATHSIG = 1

log = logging.getLogger("pipemorph.agent")


async def serve(config: AgentConfig) -> None:
    """Serve the ranks and report to the ingest until rank 0 ends, then send the last report."""
    assert config.ingest_url is not None
    merger, observer = TelemetryMerger(config.ranks), _observer(config)

    # The first agent reports at once that the ranks are starting. From a later agent that would be
    # wrong: it waits until rank 0 has sent the state of training.
    informed = asyncio.Event()
    if not config.again:
        informed.set()

    def on_telemetry(telemetry: RankTelemetry) -> None:
        merger.add(telemetry)
        uplink.notify()
        now = time.monotonic()
        if telemetry.ops is not None:
            collector.take(telemetry.ops, now)
        if telemetry.rank == 0:
            informed.set()
            done = telemetry.finished_iteration
            collector.progress(telemetry.iteration, done.seconds if done else None, now)

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
                merger.say(f"plan {version} refused: {error}")
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

    def on_part() -> None:
        uplink.observed()

    parts = PartLines(
        observer, config.mesh, config.part_ranks, on_part,
        lambda ops: collector.take(ops, time.monotonic()),
    )  # fmt: skip
    ranks = RankServer(
        bytes.fromhex(config.secret_hex), config.mesh, config.ranks, on_telemetry, parts
    )
    uplink = Uplink(
        base_url=config.ingest_url,
        namespace=config.namespace,
        job=config.job,
        attempt=config.attempt,
        token_file=config.token_file,
        merger=merger,
        observer=observer,
        on_directive=on_directive,
        on_observed=parts.tell,
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
    await ranks.close(LAST_WORDS_SECONDS if not config.part_ranks else LAST_PARTS_SECONDS)
    if informed.is_set() and (uplink.has_news or not sent):
        await uplink.flush(LAST_REPORT_SECONDS)
    if page is not None:
        await page.close()


async def serve_part(config: AgentConfig) -> None:
    """Serve the ranks of a part, and report to the job's agent, until the rank beside it ends."""
    assert config.upstream is not None and config.part is not None
    merger = TelemetryMerger(config.ranks)
    secret = bytes.fromhex(config.secret_hex)

    def on_telemetry(telemetry: RankTelemetry) -> None:
        merger.add(telemetry)
        uplink.notify()
        if telemetry.ops is not None:
            uplink.send_ops(telemetry.ops)

    ranks = RankServer(secret, config.mesh, config.ranks, on_telemetry)
    uplink = PartUplink(
        address=config.upstream,
        secret=secret,
        number=config.part,
        merger=merger,
        observer=_observer(config),
        on_plans=ranks.hand_on,
        on_asked=lambda asked: ranks.ask_ops(set(asked.ranks), asked.iteration),
    )
    await ranks.start(socket.socket(fileno=config.listen_fd))
    working = asyncio.create_task(uplink.run())
    await _rank_zero_is_gone()
    signal.alarm(LAST_RESORT_SECONDS)
    await ranks.close(LAST_WORDS_SECONDS)
    await uplink.flush(LAST_REPORT_SECONDS)
    working.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await working


def _observer(config: AgentConfig) -> Observer:
    return Observer(
        config.mesh,
        job=config.job,
        namespace=config.namespace,
        attempt=config.attempt,
        part=config.part,
        part_ranks=config.part_ranks,
        memory=secrets.token_hex(4),
    )


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
    asyncio.run(serve(config) if config.part is None else serve_part(config))


if __name__ == "__main__":
    main()
