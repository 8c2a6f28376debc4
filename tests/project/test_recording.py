"""The recording of the README: lines that scroll, in an SVG that any reader of XML accepts."""

from __future__ import annotations

from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from xml.etree import ElementTree

ROOT = Path(__file__).resolve().parents[2]


def test_lines_appear_in_turn_and_the_newest_is_the_lowest() -> None:
    spec = spec_from_file_location("recording", ROOT / "docs/recording.py")
    assert spec and spec.loader
    recording = module_from_spec(spec)
    spec.loader.exec_module(recording)
    texts = ("$ pipemorph run <job>", "plan v1: a & b", "completed")
    lines = [recording.PrintedLine(4.0 * k, text) for k, text in enumerate(texts)]
    drawn = recording.draw_recording(lines)
    root = ElementTree.fromstring(drawn)
    assert [e.text for e in root.iter("{http://www.w3.org/2000/svg}text")] == list(texts)
    # Two seconds at the fourfold speed, and five at the end.
    lowest = recording.ROW * (recording.ROWS - 1)
    assert f"0.00%{{transform:translateY({lowest}px)}}14.29%" in drawn
    assert f"translateY({lowest - 2 * recording.ROW}px)" in drawn
