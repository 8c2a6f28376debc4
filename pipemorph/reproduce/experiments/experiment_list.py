"""The experiments, in the order of the page."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import NamedTuple

from pipemorph.reproduce.compared_figure import ComparedFigure, RunForm
from pipemorph.reproduce.experiments import (
    emulated_experiments,
    iteration_experiments,
    planner_experiments,
    replica_experiments,
    trace_experiments,
)
from pipemorph.reproduce.published import load_published


class Experiment(NamedTuple):
    """Comparison of one figure or table of the paper. ``setting``: what is run, in a sentence;
    ``source``: key of the source of the published figures."""

    name: str
    title: str
    setting: str
    source: str
    run: Callable[[RunForm], Iterable[ComparedFigure]]

    @property
    def source_text(self) -> str:
        """Source of the published figures."""
        return str(load_published()["sources"][self.source])


EXPERIMENTS = (
    Experiment(
        "example",
        "The paper's example",
        "Four stages, twelve microbatches, ops of 10 ms; a delay on the first link. Simulated.",
        "paper",
        iteration_experiments.run_example,
    ),
    Experiment(
        "delays",
        "A growing delay of the last link",
        "14B model, 8 stages, 24 microbatches. Simulated; one constant is fitted, the time of an"
        " iteration outside its ops, to undisturbed zero-bubble.",
        "logs",
        iteration_experiments.run_delays,
    ),
    Experiment(
        "links",
        "Two and three slow links",
        "14B and 7B model, 30 ms on each slow link. Simulated, with the same constant.",
        "logs",
        iteration_experiments.run_links,
    ),
    Experiment(
        "models",
        "One slow link, from 7B to 60B",
        "Each model on as many GPUs as tensor × replicas × stages; 30 or 60 ms on the first or the"
        " last link. Simulated, with one constant per model.",
        "logs",
        iteration_experiments.run_models,
    ),
    Experiment(
        "redrawn",
        "Delays redrawn all the time",
        "7B model, 4 stages, 12 microbatches; all three links are slow by delays of N(30, 10) ms,"
        " some of which are redrawn at random times. Simulated; the control loop is replayed.",
        "redrawn",
        trace_experiments.run_redrawn,
    ),
    Experiment(
        "faults",
        "Nine faults in turn, 140B on 128 GPUs",
        "140B model (tensor 8, replicas 2, stages 8); the authors' trace of nine faults of one to"
        " three links, 20 to 60 ms. Simulated; the control loop is replayed, in the short form with"
        " a sixth of the iterations.",
        "faults",
        trace_experiments.run_faults,
    ),
    Experiment(
        "hour",
        "A recorded hour, 140B on 128 GPUs",
        "The recording is not public: one link at a time is slow, by delays with its published"
        " median, mean and 99th percentile, for 1, 10 or 60 s each; the spread is over these."
        " Simulated; the control loop is replayed.",
        "paper",
        trace_experiments.run_hour,
    ),
    Experiment(
        "replicas",
        "A slow link inside a ring of replicas",
        "7B model, 2 replicas × 4 stages. The time of the slowed reduction is the published one;"
        " the rest is simulated, the last row is the proposal of PipeMorph's search for places.",
        "replicas",
        replica_experiments.run_replicas,
    ),
    Experiment(
        "planner",
        "The planner against the optimum",
        "Plans of the 14B model with one to three slow links, drawn at random. The distance is that"
        " to a lower bound of all schedules, so the optimum may be nearer. Planned here, timed on"
        " this machine.",
        "paper",
        planner_experiments.run_planner,
    ),
    Experiment(
        "emulated",
        "A growing delay of the last link, emulated",
        "The 14B model as eight ranks of this machine that hold for their op times; the control"
        " loop has to find the slow link. The time outside the ops is fitted as in the simulation."
        " The short form has 60 ms only, and two ways. Emulated.",
        "logs",
        emulated_experiments.run_emulated,
    ),
    Experiment(
        "delegation",
        "The cost of delegation",
        "All messages are delegated though no link is slow; the published limit is the largest of"
        " four models. Emulated: messages of 64 KB over this machine's memory, without copies"
        " from a device.",
        "paper",
        emulated_experiments.run_delegation,
    ),
)
