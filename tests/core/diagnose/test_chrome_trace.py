"""Chrome traces are streamed, whatever their form and size."""

from __future__ import annotations

import gzip
import json
import tracemalloc
from pathlib import Path
from typing import Any

import pytest

from pipemorph.diagnose.formats.chrome_trace import iterate_events, peek_events
from pipemorph.diagnose.trace_file import TraceFile
from pipemorph.errors import InputError

EVENTS = [{"name": f"é{i}", "ts": i / 7, "args": {"s": "[{,}]", "n": [i]}} for i in range(300)]


def write(path: Path, text: str | bytes) -> TraceFile:
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    return TraceFile.open_file(path)


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("chunk", [7, 1 << 20])
def test_both_forms_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, packed: bool, chunk: int
) -> None:
    monkeypatch.setattr("pipemorph.diagnose.formats.chrome_trace.CHUNK", chunk)
    whole = {"schemaVersion": 1, "traceEvents": EVENTS, "baseTimeNanoseconds": 1234567890123}
    for form in (EVENTS, whole):
        text = json.dumps(form, indent=1).encode()
        file = write(tmp_path / "t.json", gzip.compress(text) if packed else text)
        fields: dict[str, Any] = {}
        assert list(iterate_events(file, fields)) == EVENTS
        assert peek_events(file, 5) == EVENTS[:5]
        if form is whole:
            assert fields == {"schemaVersion": 1, "baseTimeNanoseconds": 1234567890123}


def write_as_profiler(events: list[Any]) -> str:
    """Text of events in the layout of torch.profiler."""
    texts = [json.dumps(event, indent=2).replace("\n", "\n  ") for event in events]
    return '{ "schemaVersion": 1,\n"traceEvents": [\n  ' + ",\n  ".join(texts) + '\n  ], "x": 1 }'


@pytest.mark.parametrize("chunk", [7, 999, 1 << 19])
def test_events_that_do_not_matter_need_not_be_decoded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, chunk: int
) -> None:
    monkeypatch.setattr("pipemorph.diagnose.formats.chrome_trace.CHUNK", chunk)
    file = write(tmp_path / "t.json", write_as_profiler(EVENTS))
    fields: dict[str, Any] = {}
    found = list(iterate_events(file, fields, lambda text: '7"' in text))
    wanted = [event for event in EVENTS if str(event["name"]).endswith("7")]
    assert [event for event in found if event in wanted] == wanted
    assert fields == {"schemaVersion": 1, "x": 1} and (chunk < 999 or len(found) < 200)


@pytest.mark.parametrize("inner", ["}, {", "},{", "\n  },\n  {"])
def test_separators_within_an_event_are_none(tmp_path: Path, inner: str) -> None:
    nested = "[" + inner.join(['{"name": "a", "args": [{"b": 1', '"c": 2}]}']) + ',{"name": "d"}]'
    file = write(tmp_path / "t.json", nested)
    assert list(iterate_events(file, None, lambda text: True)) == json.loads(nested)


def test_empty_arrays_have_no_events(tmp_path: Path) -> None:
    for text in ("[]", ' {"traceEvents": [] } \n'):
        assert list(iterate_events(write(tmp_path / "t.json", text))) == []


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (json.dumps(EVENTS)[:-1], "ends in the middle"),
        (json.dumps(EVENTS)[:-9], "ends in the middle"),
        (json.dumps({"traceEvents": EVENTS})[:-1], "ends in the middle"),
        (gzip.compress(json.dumps(EVENTS).encode())[:-100], "ends in the middle"),
        ('{"a": 1}', "has no traceEvents"),
        ("{}", "has no traceEvents"),
        ('[{"a": 1} {"b": 2}]', "is not JSON"),
        ("[1] 2", "has more after its end"),
        ("step,rank\n", "is not JSON"),
        (b"[\xff\xfe]", "is not UTF-8"),
        ("[" * 100_000, "too deep"),
    ],
)
def test_damaged_files_are_refused_in_a_line(
    tmp_path: Path, text: str | bytes, expected: str
) -> None:
    with pytest.raises(InputError, match=expected) as found:
        list(iterate_events(write(tmp_path / "t.json", text)))
    assert str(found.value).startswith("t.json: ") and "\n" not in str(found.value)


@pytest.mark.parametrize("text", [b"", b" \n", gzip.compress(b"")])
def test_empty_files_are_refused(tmp_path: Path, text: bytes) -> None:
    with pytest.raises(InputError, match="is empty"):
        write(tmp_path / "t.json", text)


def test_missing_files_are_refused(tmp_path: Path) -> None:
    for path in (tmp_path / "none.json", tmp_path):
        with pytest.raises(InputError, match=r"No such file|Is a directory"):
            TraceFile.open_file(path)


def test_memory_does_not_grow_with_the_file(tmp_path: Path) -> None:
    line = json.dumps({"name": "x" * 900}) + ","
    file = write(tmp_path / "t.json", "[" + line * 20_000 + "{}]")
    tracemalloc.start()
    count = sum(1 for _ in iterate_events(file))
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert count == 20_001 and file.path.stat().st_size > 18_000_000
    assert peak < 8 << 20
