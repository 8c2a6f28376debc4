"""Palette of all pictures: ops strong, idle time pale, delays violet."""

from __future__ import annotations

from pipemorph.planning.analysis.bubbles import IdleCause
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
    IdleCause.FILL: "#eef0f3",
    IdleCause.DRAIN: "#dde2e9",
    IdleCause.DEPENDENCY: "#fff0b3",
    IdleCause.LINK: "#d9c2f5",
    IdleCause.CAP: "#f7aeb0",
    IdleCause.ORDER: "#b5dff2",
}
IDLE_ON_DARK = {
    IdleCause.FILL: "#252c35",
    IdleCause.DRAIN: "#303945",
    IdleCause.DEPENDENCY: "#5a4f1f",
    IdleCause.LINK: "#523a7a",
    IdleCause.CAP: "#6e3136",
    IdleCause.ORDER: "#1f4c61",
}
IDLE_NAMES = {
    IdleCause.FILL: "fill: before its first op",
    IdleCause.DRAIN: "drain: after its last op",
    IdleCause.DEPENDENCY: "dependency: input not computed yet",
    IdleCause.LINK: "link: input in transit",
    IdleCause.CAP: "cap: in_flight_limit forbids a forward",
    IdleCause.ORDER: "order: another op could run",
}
