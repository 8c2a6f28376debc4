"""Makes and caches the documents of a job's live page, for all viewers, within a budget.

A document is made only on request. All viewers get the same documents, at most one a second. Their
cost is bounded: making them and writing them as JSON and HTML takes :data:`MOST_CORE_SHARE` of one
core on average. A page is one self-contained HTML file: ``page.html`` with a document in it.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from pipemorph.views.live_page.page_builder import MOST_AVAILABLE
from pipemorph.views.live_page.page_document import PageDocument
from pipemorph.views.pictures.html import fill_template

MOST_CORE_SHARE = 0.05
"""Share of a core that documents may take in the long run, for all viewers together."""
BURST_SECONDS = 3.0
"""Seconds of a core that they may take at once, as for a viewer who steps through iterations. Also
the most that one document counts, so that the next one comes within a minute."""
MOST_DOCUMENTS = 8
"""Number of newest documents in the cache."""
LEAST_INTERVAL = 1.0
"""Least seconds between two documents of the newest iteration."""
VIEWER_TIMEOUT = 4.0
"""Seconds after a refused request for which its viewer counts as waiting."""

DocumentKey = tuple[int | None, int | None]
"""Column and iteration of a request; None: the default."""
NEWEST_KEY: DocumentKey = (None, None)
DocumentFactory = Callable[[int | None, int | None, int, bool], PageDocument]
"""Factory of documents. Arguments: column, by default that with the slowest link; iteration, by
default the newest; number of the document; and True if another one follows."""


class CpuBudget:
    """Processor time: :data:`MOST_CORE_SHARE` of a core on average, :data:`BURST_SECONDS` seconds
    at once."""

    def __init__(self) -> None:
        self.seconds_remaining, self._filled = BURST_SECONDS, time.monotonic()

    def is_spent(self, now: float) -> bool:
        """True if the budget is used up. ``now``: monotonic seconds."""
        self.seconds_remaining = min(
            BURST_SECONDS, self.seconds_remaining + MOST_CORE_SHARE * (now - self._filled)
        )
        self._filled = now
        return self.seconds_remaining <= 0

    @contextmanager
    def charge_thread_time(self) -> Iterator[None]:
        """Charge the processor time of this thread in the block to the budget."""
        began = time.thread_time()
        try:
            yield
        finally:
            self.seconds_remaining = max(
                -BURST_SECONDS, self.seconds_remaining - (time.thread_time() - began)
            )


NOTHING_NEW = b"null"


@dataclass
class CachedDocument:
    """Document with the time at which it was made (monotonic) and its encodings. ``page``: as HTML
    page, once requested."""

    number: int
    live: bool
    columns: int
    available: list[int]
    made_at: float
    json: bytes
    page: bytes | None = None

    @staticmethod
    def from_view(view: PageDocument, at: float) -> CachedDocument:
        """Encode a document made at ``at``, monotonic seconds."""
        json = view.model_dump_json().encode()
        return CachedDocument(view.number, view.live, len(view.columns), view.available, at, json)

    def make_page(self) -> None:
        self.page = render_page_json(self.json.decode()).encode()

    def select_body(self, *, page: bool, after: int | None) -> bytes:
        """Response to a request for the page, or for a document after number ``after``."""
        if page:
            return self.page or b""
        return NOTHING_NEW if self.live and after == self.number else self.json


class DocumentCache:
    """Documents of one job. For use by one thread at a time, except :meth:`mark_finished`."""

    def __init__(self, make: DocumentFactory) -> None:
        self._make_view = make
        self.budget = CpuBudget()
        self._made: dict[DocumentKey, CachedDocument] = {}
        self._newest: CachedDocument | None = None
        """Newest document, of any iteration."""
        self._last: bool | None = None
        """True if the newest document was requested for the newest iteration."""
        self._waiting: dict[bool, float] = {}
        """Time of the last refusal, for the newest iteration (True) and for another one (False)."""
        self.number = 0
        """Number of the newest document."""
        self._over = False
        self._ended: set[bool] = set()
        """Kinds of which a final document was made, with the keys of :attr:`_waiting`."""

    def mark_finished(self) -> None:
        """Mark the job as over: the next documents are final. One of the newest iteration and one
        of another are made at once, all others within the budget."""
        self._over = True

    def get(self, request: DocumentKey, page: bool = False) -> CachedDocument | None:
        """Get a document, with its HTML for a ``page``. If another one would come too soon, or cost
        too much, the cached one; without that, any other for a page, else None."""
        now = time.monotonic()
        request = self._resolve_key(request)
        made = self._made.get(request)
        is_last = made is not None and not made.live
        is_final = self._over and not is_last and (request[1] is None) not in self._ended
        if is_final or self._newest is None:
            made = self._make_document(request, now)
        elif made is None or (not is_last and now - made.made_at >= LEAST_INTERVAL):
            if not self._must_wait(request, now):
                made = self._make_document(request, now)
            elif made is None and page:
                made = self._made.get(NEWEST_KEY, self._newest)
        if made is None:
            return None
        if page and made.page is None:
            with self.budget.charge_thread_time():
                made.make_page()
        return made

    def _must_wait(self, request: DocumentKey, now: float) -> bool:
        """True if another document would cost too much now. Requests for the newest iteration and
        for older ones take turns, or the first kind would use the whole budget."""
        kind, other = request[1] is None, request[1] is not None
        their_turn = (
            self._last is kind and now - self._waiting.get(other, -math.inf) < VIEWER_TIMEOUT
        )
        paced = self.budget.is_spent(now) or their_turn
        if paced:
            self._waiting[kind] = now
        return paced

    def _make_document(self, request: DocumentKey, now: float) -> CachedDocument:
        self._last = request[1] is None
        self._waiting.pop(self._last, None)
        self.number += 1
        self.budget.is_spent(now)  # Refills the budget before the document is charged.
        with self.budget.charge_thread_time():
            view = self._make_view(*request, self.number, not self._over)
            made = CachedDocument.from_view(view, now)
        if not view.live:
            self._ended.add(self._last)
        self._made.pop(request, None)
        self._made[request] = self._newest = made
        oldest = [each for each in self._made if each != NEWEST_KEY]
        for each in oldest[: max(0, len(self._made) - MOST_DOCUMENTS)]:
            del self._made[each]
        return made

    def _resolve_key(self, request: DocumentKey) -> DocumentKey:
        """Request with the default in place of a column or iteration that does not exist by the
        newest document, so that all such requests share a document."""
        if self._newest is None:
            return request
        (column, iteration), newest = request, self._newest
        if column is not None and column >= newest.columns:
            column = None
        stored = newest.available
        # The document lists only the newest of many.
        gone = len(stored) < MOST_AVAILABLE and iteration not in stored
        if iteration is not None and (gone or iteration > stored[-1]):
            iteration = None
        return column, iteration


def parse_number(text: str | None) -> int | None:
    """Parse a column, an iteration or a document's number in a query; None for other text."""
    return int(text) if text and text.isascii() and text.isdigit() and len(text) < 12 else None


# --- the page ---------------------------------------------------------------------------------


def render_live_page(view: PageDocument) -> str:
    """Page with a document. It updates itself if the document is ``live``."""
    return render_page_json(view.model_dump_json())


def render_page_json(view: str) -> str:
    """Page with a document in JSON."""
    return fill_template(Path(__file__).with_name("page.html"), f'{{"view":{view}}}')
