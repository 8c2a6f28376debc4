"""Colours differ for readers with protanopia and deuteranopia; texts can be read on both grounds.

The simulation: Machado, Oliveira, Fernandes, "A Physiologically-based Model for Simulation of Color
Vision Deficiency" (2009), severity 1; distances are CIE76, in CIELAB under D65.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations

import numpy
import pytest
from numpy.typing import NDArray

from pipemorph.planning.analysis.bubbles import IdleCause
from pipemorph.views.pictures.colours import LETTERS, LINES, PALETTE

Vector = NDArray[numpy.float64]
VISION = {
    "usual": numpy.eye(3),
    "protanopia": numpy.array(
        [
            [0.152286, 1.052583, -0.204868],
            [0.114503, 0.786281, 0.099216],
            [-0.003882, -0.048116, 1.051998],
        ]
    ),
    "deuteranopia": numpy.array(
        [
            [0.367322, 0.860646, -0.227968],
            [0.280085, 0.672501, 0.047413],
            [-0.011820, 0.042940, 0.968881],
        ]
    ),
}
XYZ = numpy.array(
    [[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]]
) / numpy.array([[0.95047], [1.0], [1.08883]])
OPS, IDLE = list(LETTERS.values()), [cause.value for cause in IdleCause]
LINKS = ["healthy", "delayed", "narrow", "unknown", "down"]
OTHERS = ["L", "D", "G", "K", "O"]


def linear(colour: str) -> Vector:
    """Linear red, green and blue, 0 to 1."""
    parts = numpy.array([int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)])
    return numpy.where(parts <= 0.04045, parts / 12.92, ((parts + 0.055) / 1.055) ** 2.4)


def lab(colour: str, vision: str) -> Vector:
    seen = XYZ @ numpy.clip(VISION[vision] @ linear(colour), 0, 1)
    x, y, z = numpy.where(seen > 0.008856, numpy.cbrt(seen), 7.787 * seen + 16 / 116)
    return numpy.array([116 * y - 16, 500 * (x - y), 200 * (y - z)])


def luminance(colour: str) -> float:
    return float(XYZ[1] @ linear(colour))


def contrast(one: str, other: str) -> float:
    """Contrast by WCAG 2."""
    low, high = sorted((luminance(one), luminance(other)))
    return (high + 0.05) / (low + 0.05)


@pytest.mark.parametrize("ground", [0, 1])
@pytest.mark.parametrize("vision", list(VISION))
@pytest.mark.parametrize(
    ("names", "least"),
    [
        (OPS, 45),
        (LINKS, 19),
        (OPS + LINKS[:4], 17),
        (IDLE, 11),
        (OPS + IDLE, 11),
        (OPS + OTHERS, 18),
        (LINES[:4], 24),
    ],
)
def test_colours_shown_together_differ(
    names: Sequence[str], least: float, vision: str, ground: int
) -> None:
    seen = {name: lab(PALETTE[name][ground], vision) for name in names}
    for one, other in combinations(names, 2):
        distance = numpy.linalg.norm(seen[one] - seen[other])
        assert distance >= least, f"{one} and {other}: {distance:.1f}"


@pytest.mark.parametrize("ground", [0, 1])
def test_texts_can_be_read(ground: int) -> None:
    def of(name: str) -> str:
        return PALETTE[name][ground]

    pairs = [(f"on-{each}", each) for each in OPS + OTHERS]
    pairs += [("on", each) for each in ("delayed", "narrow", "unknown")]
    pairs += [("ink", "healthy"), ("on-down", "down")]
    pairs += [(text, back) for text in ("ink", "dim", "accent") for back in ("back", "plot")]
    for text, back in pairs:
        assert contrast(of(text), of(back)) >= 4.5, (text, back)
    for name in LINES:
        assert contrast(of(name), of("back")) >= 3, name
