"""Labels of the history of a replay, measured in a real browser."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import pytest
from browser import Browser

from pipemorph.replay.baselines import ReplayedChange, ReplayResult, TrainingRun
from pipemorph.replay.link_trace import parse_trace
from pipemorph.replay.replay_page import render_replay_page

pytestmark = pytest.mark.full

DRAWN = """(width => {
  const pen = new SvgPen(width, historyHeight(HISTORY)), svg = document.createElement('div');
  drawHistory(pen, colours(), HISTORY);
  svg.innerHTML = `<svg width="${width}" height="${pen.height}">${pen.parts.join('')}</svg>`;
  document.body.append(svg);
  const named = name => [...svg.querySelectorAll('text')].filter(t => t.textContent.includes(name));
  const frame = historyFrame(width, HISTORY), marks = HISTORY.marks.map(m => frame.x(m.at));
  const boxes = named('plan changed').map(t => t.getBBox());
  const lanes = named('iteration 2').map(t => t.textContent);
  svg.remove();
  const edge = frame.edge + frame.plot;
  return { lanes, boxes: boxes.map(b => [b.x, b.x + b.width]), marks, edge };
})"""


def test_labels_of_changes_lie_on_no_other_label_or_mark(browser: Browser, tmp_path: Path) -> None:
    trained = {name: TrainingRun((0.4,) * 224) for name in ("static", "adaptive", "oracle")}
    changes = [ReplayedChange(at, "", 0.3, 0.3, "") for at in (21, 31, 37, 120, 214)]
    lines = (
        '{"at_iteration": 20, "links": {"0": {"delay_ms": 20}}}',
        '{"at_iteration": 24, "links": {}}',
    )
    trace = parse_trace("\n".join(lines), 3)
    path = tmp_path / "replay.html"
    path.write_text(render_replay_page(ReplayResult(224, trained, changes), trace, "a trace"))
    browser.look(path.as_uri())
    for width, labels in ((1160, 4), (366, 3)):
        found = browser.eval(f"{DRAWN}({width})")
        boxes = sorted(found["boxes"])
        assert len(boxes) == labels, "without room a mark has no label"
        assert all(a[1] <= b[0] for a, b in pairwise(boxes))
        assert boxes[-1][1] <= found["edge"]
        assert not [m for m in found["marks"] for a, b in boxes if a < m < b]
        assert found["lanes"] == ["+20 ms up to iteration 24"]
