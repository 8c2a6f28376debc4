"""The connection of a part's agent to the job's agent: sends reports, receives answers and plans.

A report counts as told once it is sent: if it is lost, so is the connection, and after that all is
told again. While the job's agent is busy, reports wait in the connection, and when that is full the
next one has what is newest. A connection that is lost is made again with backoff, for ever;
meanwhile the part observes, and its ranks keep their plan.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
import time
from collections.abc import Callable

from pipemorph.control.observe.observer import Observer
from pipemorph.wire import OpsTrace
from pipemorph_trainer.agent import frames, lines
from pipemorph_trainer.agent.merge import TelemetryMerger
from pipemorph_trainer.agent.ops import PartOps
from pipemorph_trainer.agent.parts import PartAsked, PartMessage, PartPlans
from pipemorph_trainer.agent.uplinks.observing import Observing, wait

log = logging.getLogger("pipemorph.agent")

HANDSHAKE_SECONDS = 60.0
FIRST_BACKOFF_SECONDS, LAST_BACKOFF_SECONDS = 0.1, 5.0
ATTEND_SECONDS = 1.0
"""Between two looks whether a report is due, without telemetry."""
MOST_UNSENT_BYTES = 4 << 20
"""Above that, the connection counts as busy, and ops are dropped. Ranks of a part finish an
iteration together: the ops of one of them must not keep out those of the next."""


class PartUplink:
    """Lets ``observer`` observe the ranks of part ``number``, and reports to the job's agent at
    ``address``. ``on_plans`` is called with the plans of its ranks, as they come, ``on_asked``
    with which of them are asked for ops."""

    def __init__(
        self,
        *,
        address: tuple[str, int],
        secret: bytes,
        number: int,
        merger: TelemetryMerger,
        observer: Observer,
        on_plans: Callable[[PartPlans], None],
        on_asked: Callable[[PartAsked], None] = lambda _: None,
    ) -> None:
        self._address, self._secret, self._number = address, secret, number
        self._observing = Observing(merger, observer, self._observed)
        self._observer, self._on_plans = observer, on_plans
        self._on_asked = on_asked
        self._due, self._sent = asyncio.Event(), asyncio.Event()
        self._line: asyncio.StreamWriter | None = None
        self._sequence = 0
        self._ending = False
        self._newest_plan = 0
        self.notify = self._observing.notify

    def _observed(self) -> None:
        if self._observer.due(time.time()):
            self._due.set()

    async def run(self) -> None:
        """Observe, report and receive until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._observing.run())
            tasks.create_task(self._stay_connected())

    async def flush(self, timeout: float) -> bool:
        """Report what is left within ``timeout`` seconds, while :meth:`run` runs. Returns whether
        all of it was sent."""
        self._observing.observe(refresh=True)
        self._ending = True
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout):
                while self._observing.has_news:
                    self._sent.clear()
                    self._due.set()
                    await self._sent.wait()
                return True
        return False

    async def _stay_connected(self) -> None:
        backoff, down_since = FIRST_BACKOFF_SECONDS, None
        while True:
            try:
                reader, line = await self._connect()
                if down_since is not None:
                    log.info("the job's agent again after %.1f s", time.monotonic() - down_since)
                backoff, down_since = FIRST_BACKOFF_SECONDS, None
                await self._converse(reader, line)
            except (OSError, EOFError, TimeoutError, frames.FrameError) as error:
                if down_since is None:
                    down_since = time.monotonic()
                    why = str(error) or type(error).__name__
                    log.warning(
                        "part %d: no connection to the job's agent (%s); trying again, training "
                        "goes on with the current plan", self._number, why,
                    )  # fmt: skip
            await asyncio.sleep(backoff * random.uniform(0.75, 1.25))
            backoff = min(2 * backoff, LAST_BACKOFF_SECONDS)

    async def _connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        async with asyncio.timeout(HANDSHAKE_SECONDS):
            reader, line = await asyncio.open_connection(*self._address)
            try:
                lines.keep_alive(line)
                await lines.introduce(reader, line, self._secret, "part", self._number)
            except BaseException:
                line.close()
                raise
            return reader, line

    async def _converse(self, reader: asyncio.StreamReader, line: asyncio.StreamWriter) -> None:
        """Report over one connection until it is lost."""
        self._line = line
        line.transport.set_write_buffer_limits(high=0)
        self._due.set()
        sending = asyncio.create_task(self._send())
        try:
            while True:
                self._take(await lines.read(reader))
        finally:
            sending.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await sending
            self._line = None
            line.close()

    async def _send(self) -> None:
        while True:
            await wait(self._due, ATTEND_SECONDS)
            self._due.clear()
            now = time.time()
            if self._line is None or not (self._ending or self._observer.due(now)):
                continue
            self._sequence += 1
            report = self._observer.report(self._sequence, now, self._newest_plan)
            self._line.write(frames.frame(report.body()))
            self._observer.told(report)
            with contextlib.suppress(OSError):  # Then receiving fails, too.
                await self._line.drain()
            self._sent.set()

    def send_ops(self, ops: OpsTrace) -> None:
        """Send ops that were asked for, unless the connection is down or busy."""
        line = self._line
        if line is not None and line.transport.get_write_buffer_size() <= MOST_UNSENT_BYTES:
            line.write(frames.encode(PartOps(ops=ops)))

    def _take(self, payload: bytes) -> None:
        message = frames.decode(PartMessage, payload)
        if message.answer is not None:
            self._observer.take(message.answer, time.time())
            self._observed()
        if message.asked is not None:
            self._on_asked(message.asked)
        if message.plans is not None:
            newest = max((plan.version for plan in message.plans.plans), default=0)
            self._newest_plan = max(self._newest_plan, newest)
            self._on_plans(message.plans)
