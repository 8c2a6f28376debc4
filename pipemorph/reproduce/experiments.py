"""The experiments, in the order of the page."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import NamedTuple

from pipemorph.reproduce import iteration_experiments
from pipemorph.reproduce.compared_figure import ComparedFigure
from pipemorph.reproduce.published import load_published


class Experiment(NamedTuple):
    """Comparison of one figure or table of the paper. ``setting``: what is run, in a sentence;
    ``source``: key of the source of the published figures."""

    name: str
    title: str
    setting: str
    source: str
    run: Callable[[], Iterable[ComparedFigure]]

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
)
