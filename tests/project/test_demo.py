"""The demo reports, in its exit status too, that a slow link was not answered."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from pipemorph.views.pictures import Drawing

PATH = Path(__file__).resolve().parents[2] / "examples" / "demo.py"


@pytest.fixture(scope="module")
def demo() -> ModuleType:
    spec = importlib.util.spec_from_file_location("demo", PATH)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def report(*adaptations: dict[str, Any], loss: float = 1.0) -> dict[str, Any]:
    iterations = [{"seconds": 1.0, "loss": loss} for _ in range(36)]
    return {"iterations": iterations, "adaptations": list(adaptations)}


ANSWER = {
    "applied_at_iteration": 11, "detected_at_iteration": 10, "links": [{"link": 0}],
    "plan_version": 1, "warmup_before": [3, 1], "warmup_after": [4, 1],
}  # fmt: skip


@pytest.mark.parametrize(
    ("ours", "said"),
    [
        (report(ANSWER), None),
        (report(), "no plan answered it"),
        (report(ANSWER | {"applied_at_iteration": None}), "no plan answered it"),
        (report(ANSWER | {"links": [{"link": 1}]}), "no plan answered it"),
        (report(ANSWER, loss=2.0), "losses of the two runs are not the same"),
    ],
)
def test_its_exit_status(
    *,
    demo: ModuleType,
    ours: dict[str, Any],
    said: str | None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    reports = {demo.OURS: ours, demo.BASELINE: report()}
    monkeypatch.setattr(demo, "train", lambda policy, stages, out: reports[policy])
    monkeypatch.setattr(demo, "emulate", lambda out: 0)
    monkeypatch.setattr(demo, "draw", lambda *_: None)
    monkeypatch.setattr(demo, "draw_emulated", lambda *_: None)
    monkeypatch.setattr("sys.argv", ["demo.py", "--out", str(tmp_path)])
    assert demo.main() == (said is not None)
    shown = capsys.readouterr().out
    assert said is None or said in shown
    assert "nan" not in shown


def test_its_picture_names_the_gain(
    demo: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Drawing, "to_png", lambda drawing: drawing.label.encode())
    slow = report()
    for each in slow["iterations"][demo.SLOW_FROM : demo.SLOW_TO]:
        each["seconds"] = 2.0
    path = tmp_path / "gpt.png"
    demo.draw(report(ANSWER), slow, path)
    assert ": 2.0× faster with PipeMorph;" in path.read_text()
    demo.draw(report(), slow, path)
    assert "faster" not in path.read_text(), "nothing answered"


def test_the_emulated_stages_are_drawn_beside_the_published_figures(
    demo: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    drawn: list[Any] = []

    def draw(*given: Any, **_: Any) -> Drawing:
        drawn.append(given)
        drawing = Drawing(9, "")
        drawing.height = 9
        return drawing

    monkeypatch.setattr("pipemorph.views.pictures.draw_chart", draw)
    rows = [{"seconds": {"0.0": 0.8, "60.0": slow}} for slow in (3.0, 1.0)]
    (tmp_path / "emulated.json").write_text(json.dumps([*rows, {"narrow": 1.0}]))
    demo.draw_emulated(tmp_path / "emulated.json", tmp_path / "emulated.png")
    ((title, lines),) = drawn
    assert title == (
        "14B model, 8 emulated stages: 3.0× as fast at 60 ms (published, on GPUs: 3.7×)"
    )
    assert [(line.name, line.points[-1], line.dots) for line in lines] == [
        ("pipemorph, here", (60.0, 1000.0), False),
        ("zero-bubble, here", (60.0, 3000.0), False),
        ("pipemorph, published", (60.0, 891.0), True),
        ("zero-bubble, published", (60.0, 3257.0), True),
    ]
