"""One palette for all pictures: ops strong, idle time pale, delays violet."""

from __future__ import annotations

from pipemorph.planning.analysis.bubbles import Cause
from pipemorph.planning.ir import OpKind

# Distinguishable in grey and by the colour-blind: F dark, B middle, W light.
FILL = {OpKind.F: "#3b6fb6", OpKind.B: "#e08a3c", OpKind.W: "#9ccf8e", OpKind.BW: "#c8553d"}
INK = {OpKind.F: "white", OpKind.B: "black", OpKind.W: "black", OpKind.BW: "white"}
NAMES = {
    OpKind.F: "F forward",
    OpKind.B: "B backward, input",
    OpKind.W: "W backward, weights",
    OpKind.BW: "BW fused backward",
}
BUBBLE = "#f1e6e6"
DELAY = "#8a2be2"
IDLE = {
    Cause.FILL: "#eef0f3",
    Cause.DRAIN: "#dde2e9",
    Cause.DEPENDENCY: "#fff0b3",
    Cause.LINK: "#d9c2f5",
    Cause.CAP: "#f7aeb0",
    Cause.ORDER: "#b5dff2",
}
IDLE_ON_DARK = {
    Cause.FILL: "#252c35",
    Cause.DRAIN: "#303945",
    Cause.DEPENDENCY: "#5a4f1f",
    Cause.LINK: "#523a7a",
    Cause.CAP: "#6e3136",
    Cause.ORDER: "#1f4c61",
}
IDLE_NAMES = {
    Cause.FILL: "fill: before its first op",
    Cause.DRAIN: "drain: after its last op",
    Cause.DEPENDENCY: "dependency: input not computed yet",
    Cause.LINK: "link: input on its way",
    Cause.CAP: "cap: in_flight_limit forbids a forward",
    Cause.ORDER: "order: another op could run",
}
