"""Makes the documents of a job that somebody watches: for all who look together, within a budget.

Nothing is made while nobody asks. All who ask get the same documents, at most one a second, and
what those cost is bounded: :data:`SHARE` of one core on average, to make them and to write them as
JSON and HTML. A page is one self-contained HTML file: ``page.html`` with a document in it.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from pipemorph.pictures.colours import FILL, IDLE, IDLE_NAMES, IDLE_ON_DARK, INK, NAMES
from pipemorph.pictures.html import fill
from pipemorph.planning.analysis.bubbles import Cause
from pipemorph.watch.build import MOST_AVAILABLE
from pipemorph.watch.document import LETTERS, WatchView

SHARE = 0.05
"""Part of a core that documents may take in the long run, for all viewers together."""
BURST = 3.0
"""Seconds of a core that they may take at once, as when somebody steps through iterations; and the
most that one document counts for, so that the next one comes in a minute."""
DOCUMENTS = 8
"""Newest documents that are kept."""
EVERY = 1.0
"""Least seconds between two documents of the newest iteration."""
LOOKING = 4.0
"""Who has asked within so many seconds still looks."""

Asked = tuple[int | None, int | None]
"""Column and iteration; None: the default."""
NEWEST: Asked = (None, None)
MakeView = Callable[[int | None, int | None, int, bool], WatchView]
"""Makes a document: of a column, by default that with the slowest link, and an iteration, by
default the newest; with its number, and whether another one follows."""


class Budget:
    """Seconds of a core: :data:`SHARE` of one on average, :data:`BURST` at once."""

    def __init__(self) -> None:
        self.left, self._filled = BURST, time.monotonic()

    def is_spent(self, now: float) -> bool:
        """Whether nothing is left. ``now``: monotonic seconds."""
        self.left = min(BURST, self.left + SHARE * (now - self._filled))
        self._filled = now
        return self.left <= 0

    @contextmanager
    def counted(self) -> Iterator[None]:
        """Take what this thread uses meanwhile off what is left."""
        began = time.thread_time()
        try:
            yield
        finally:
            self.left = max(-BURST, self.left - (time.thread_time() - began))


NOTHING_NEW = b"null"


@dataclass
class Made:
    """A document, when it was made (monotonic), and how it is sent. ``page``: with the page around
    it, once somebody has asked for that."""

    number: int
    live: bool
    columns: int
    available: list[int]
    at: float
    json: bytes
    page: bytes | None = None

    @staticmethod
    def of(view: WatchView, at: float) -> Made:
        json = view.model_dump_json().encode()
        return Made(view.number, view.live, len(view.columns), view.available, at, json)

    def make_page(self) -> None:
        self.page = page_of(self.json.decode()).encode()

    def body(self, *, page: bool, after: int | None) -> bytes:
        """What to send to who asks for the page, or for a document after that number."""
        if page:
            return self.page or b""
        return NOTHING_NEW if self.live and after == self.number else self.json


class Documents:
    """The documents of one job. For use by one thread at a time, but :meth:`finish`."""

    def __init__(self, make: MakeView) -> None:
        self._make_view = make
        self.budget = Budget()
        self._made: dict[Asked, Made] = {}
        self._newest: Made | None = None
        """The newest document, of whatever iteration."""
        self._last: bool | None = None
        """Whether the newest document was asked for as that of the newest iteration."""
        self._waiting: dict[bool, float] = {}
        """When one of the newest iteration, and one of another, was last refused."""
        self.number = 0
        """Of the newest document."""
        self._over = False
        self._ended: set[bool] = set()
        """Of what kinds a last document was made: of the newest iteration, of another."""

    def finish(self) -> None:
        """The job is over: the next document says so, and that nothing follows. One of the newest
        iteration and one of another are made at once, all others within the budget."""
        self._over = True

    def get(self, asked: Asked, page: bool = False) -> Made | None:
        """The document, for a ``page`` with its HTML. That of before while another would come too
        soon, or cost too much. If there is none of before: for a page another one, else None."""
        now = time.monotonic()
        asked = self._existing(asked)
        made = self._made.get(asked)
        is_last = made is not None and not made.live
        last_word = self._over and not is_last and (asked[1] is None) not in self._ended
        if last_word or self._newest is None:
            made = self._make(asked, now)
        elif made is None or (not is_last and now - made.at >= EVERY):
            if not self._is_paced(asked, now):
                made = self._make(asked, now)
            elif made is None and page:
                made = self._made.get(NEWEST, self._newest)
        if made is None:
            return None
        if page and made.page is None:
            with self.budget.counted():
                made.make_page()
        return made

    def _is_paced(self, asked: Asked, now: float) -> bool:
        """Whether another document would cost too much now. Who steps through iterations and who
        looks at the newest one take turns, else the one who asks first would get all."""
        kind, other = asked[1] is None, asked[1] is not None
        their_turn = self._last is kind and now - self._waiting.get(other, -math.inf) < LOOKING
        paced = self.budget.is_spent(now) or their_turn
        if paced:
            self._waiting[kind] = now
        return paced

    def _make(self, asked: Asked, now: float) -> Made:
        self._last = asked[1] is None
        self._waiting.pop(self._last, None)
        self.number += 1
        self.budget.is_spent(now)  # What was gained until now does not pay for what follows.
        with self.budget.counted():
            view = self._make_view(*asked, self.number, not self._over)
            made = Made.of(view, now)
        if not view.live:
            self._ended.add(self._last)
        self._made.pop(asked, None)
        self._made[asked] = self._newest = made
        oldest = [each for each in self._made if each != NEWEST]
        for each in oldest[: max(0, len(self._made) - DOCUMENTS)]:
            del self._made[each]
        return made

    def _existing(self, asked: Asked) -> Asked:
        """What is asked for, with the default in place of what there is not, as far as the newest
        document tells: all who ask for such get one document."""
        if self._newest is None:
            return asked
        (column, iteration), newest = asked, self._newest
        if column is not None and column >= newest.columns:
            column = None
        kept = newest.available
        # The document names only the newest of many.
        gone = len(kept) < MOST_AVAILABLE and iteration not in kept
        if iteration is not None and (gone or iteration > kept[-1]):
            iteration = None
        return column, iteration


def number(text: str | None) -> int | None:
    """A column, an iteration or a document's number in a query; None for anything else."""
    return int(text) if text and text.isascii() and text.isdigit() and len(text) < 12 else None


# --- the page ---------------------------------------------------------------------------------

CAUSES = {Cause.ORDER: "order: nothing of another rank was missing"}
"""Other names than elsewhere, see :func:`pipemorph.watch.build.idle_times`."""
STYLE = {
    "kinds": {
        LETTERS[kind]: {"name": NAMES[kind], "fill": FILL[kind], "ink": INK[kind]} for kind in FILL
    },
    "causes": {
        cause.value: {
            "name": CAUSES.get(cause, IDLE_NAMES[cause]),
            "fill": IDLE[cause],
            "dark": IDLE_ON_DARK[cause],
        }
        for cause in IDLE
    },
}


def render_page(view: WatchView) -> str:
    """The page with a document, from which it goes on by itself where that is ``live``."""
    return page_of(view.model_dump_json())


def page_of(view: str) -> str:
    """The same of a document as JSON."""
    data = f'{{"style":{json.dumps(STYLE)},"view":{view}}}'
    return fill(Path(__file__).with_name("page.html"), data)
