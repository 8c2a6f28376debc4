"""Streams the events of a Chrome trace (Trace Event Format), whatever its size.

Both forms are read: an array of events, and an object whose ``traceEvents`` is that array. Memory
does not grow with the file: events are decoded from a buffer of ``CHUNK`` characters, all that are
whole in it at once. One by one takes twice the time; it is how the rest is decoded, and what fails.
"""

from __future__ import annotations

import json
import re
import zlib
from collections.abc import Callable, Iterator
from typing import Any

from pipemorph.diagnose.trace_file import TraceFile
from pipemorph.errors import InputError

CHUNK = 1 << 19
"""Characters that are read at once."""
PROFILER_SEPARATOR = "\n  },\n  {"
"""Text between two events of ``torch.profiler``. No string of JSON has a line break."""
_SEPARATORS = (PROFILER_SEPARATOR, "}, {", "},{")
LARGEST_VALUE = 64 << 20
"""Most characters of one event, or of one other field of the file."""
_SPACE = re.compile(r"[ \t\r\n]*")
_decode = json.JSONDecoder().raw_decode


def iterate_events(
    file: TraceFile,
    fields: dict[str, Any] | None = None,
    may_matter: Callable[[str], bool] | None = None,
) -> Iterator[dict[str, Any]]:
    """Events of a trace in file order, as dictionaries; entries that are no objects are skipped.

    ``fields`` gets all fields but ``traceEvents``, such as ``distributedInfo``: those that precede
    the events before the first event, the others after the last. ``may_matter(text)``: false for
    the text of an event that the caller skips: those of ``torch.profiler`` are not decoded then.
    Raises :class:`InputError` where the file ends early or is not JSON.
    """
    with file.open_text() as stream:
        text = _TextBuffer(file, stream, may_matter)
        opening = text.next_character()
        if opening == "[":
            text.at += 1
            yield from _iterate_array(text)
        elif opening == "{":
            text.at += 1
            yield from _iterate_object(text, {} if fields is None else fields)
        else:
            raise text.make_error("is not JSON")
        if text.next_character(end_allowed=True):
            raise text.make_error("has more after its end")


def peek_events(file: TraceFile, most: int = 1000) -> list[dict[str, Any]]:
    """First events, at most ``most``, of the head of ``file``; empty if it is no Chrome trace."""
    head = file.text
    begins = 0
    if head.lstrip().startswith("{"):
        found = re.search(r'"traceEvents"\s*:\s*(?=\[)', head)
        if found is None:
            return []
        begins = found.end()
    begins = head.find("[", begins) + 1
    events: list[dict[str, Any]] = []
    while begins and len(events) < most:
        begins = _SPACE.match(head, begins).end()  # type: ignore[union-attr]
        try:
            event, begins = _decode(head, begins)
        except (ValueError, RecursionError):
            break
        if isinstance(event, dict):
            events.append(event)
        begins = _SPACE.match(head, begins).end()  # type: ignore[union-attr]
        if head[begins : begins + 1] != ",":
            break
        begins += 1
    return events


class _TextBuffer:
    """Part of a text that is being decoded. ``at``: position of the next character."""

    def __init__(
        self, file: TraceFile, stream: Any, may_matter: Callable[[str], bool] | None
    ) -> None:
        self.file = file
        self.stream = stream
        self.may_matter = may_matter
        self.text = ""
        self.at = 0
        self.ended = False
        self.has_batches = True

    def make_error(self, what: str) -> InputError:
        return InputError(f"{self.file.name}: {what}; expected a Chrome trace")

    def read_more(self) -> None:
        """Append the next chunk, and drop what has been decoded."""
        try:
            more = self.stream.read(max(CHUNK, len(self.text) - self.at))
        except UnicodeDecodeError:
            raise self.make_error("is not UTF-8 text") from None
        except (OSError, EOFError, zlib.error):
            raise self.file.truncated_error() from None
        self.ended = not more
        self.text = self.text[self.at :] + more
        self.at = 0

    def next_character(self, *, end_allowed: bool = False) -> str:
        """Next character that is no space, without taking it; empty at an allowed end."""
        while True:
            self.at = _SPACE.match(self.text, self.at).end()  # type: ignore[union-attr]
            if self.at < len(self.text):
                return self.text[self.at]
            if self.ended:
                if end_allowed:
                    return ""
                raise self.file.truncated_error()
            self.read_more()

    def take_character(self, expected: str) -> str:
        """Take the next character, one of ``expected``."""
        found = self.next_character()
        if found not in expected:
            raise self.make_error(f"is not JSON (found {found!r} where {expected!r} belongs)")
        self.at += 1
        return found

    def decode_batch(self) -> list[Any]:
        """Take the array's values up to the last separator of two events in the text, and the comma
        after them; empty if there is none, or if what it separates is no whole values."""
        if not self.has_batches or self.next_character() != "{":
            return []
        for separator in _SEPARATORS:
            if (found := self.text.rfind(separator, self.at)) >= 0:
                break
        else:
            # Another form: its next events are not searched again.
            self.has_batches = len(self.text) - self.at < CHUNK // 2
            return []
        end = found + separator.find("}") + 1
        batch = self.text[self.at : end]
        if self.may_matter is not None and separator == PROFILER_SEPARATOR:
            texts = list(filter(self.may_matter, batch[1:-1].split(PROFILER_SEPARATOR)))
            batch = "{" + "},{".join(texts) + "}" if texts else ""
        try:
            values = json.loads(f"[{batch}]")
        except (ValueError, RecursionError):
            # Also at the end of the array: what follows is decoded one by one.
            self.has_batches = False
            return []
        self.at = end
        self.take_character(",")
        return values  # type: ignore[no-any-return]

    def decode_value(self) -> Any:
        """Take the next JSON value."""
        self.next_character()
        while True:
            try:
                value, end = _decode(self.text, self.at)
                # A number may go on in the next chunk.
                if end < len(self.text) or self.ended:
                    self.at = end
                    return value
            except json.JSONDecodeError as error:
                if self.ended:
                    raise self.file.truncated_error() from None
                if len(self.text) - self.at > LARGEST_VALUE:
                    raise self.make_error(f"is not JSON ({error.msg})") from None
            except (ValueError, RecursionError):
                raise self.make_error("has a value that is too long or too deep") from None
            if len(self.text) - self.at > LARGEST_VALUE:
                raise self.make_error("has a value of more than 64 MiB")
            self.read_more()


def _iterate_array(text: _TextBuffer) -> Iterator[dict[str, Any]]:
    """Objects of an array whose bracket has been taken."""
    if text.next_character() == "]":
        text.at += 1
        return
    while True:
        for value in text.decode_batch():
            if isinstance(value, dict):
                yield value
        value = text.decode_value()
        if isinstance(value, dict):
            yield value
        if text.take_character(",]") == "]":
            return


def _iterate_object(text: _TextBuffer, fields: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Events of an object whose brace has been taken."""
    found = False
    if text.next_character() == "}":
        raise text.make_error("has no traceEvents")
    while True:
        if text.next_character() != '"':
            raise text.make_error("is not JSON")
        key = text.decode_value()
        text.take_character(":")
        if key == "traceEvents":
            found = True
            text.take_character("[")
            yield from _iterate_array(text)
        else:
            fields[key] = text.decode_value()
        if text.take_character(",}") == "}":
            break
    if not found:
        raise text.make_error("has no traceEvents")
