"""``pipemorph advise PROBLEM``: predicts the gain of more microbatches, another split, offload."""

from __future__ import annotations

import argparse
import json
from typing import Any

from pipemorph.commands.output_file import add_output_arguments, choose_output_format, write_output
from pipemorph.planning.advice import Advice, AdviceOption, compare_changes
from pipemorph.planning.problem import Problem, load_problem
from pipemorph.terminal import RenderableType, make_table, render_parts

FORMATS = ("text", "json")
HEADINGS = ("lever", "change", "iteration", "per sample", "bubble", "memory", "")


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "advise",
        help="compare more microbatches, another split and offload with today",
        description="Plan PROBLEM as it is and with each of three changes: more microbatches, "
        "another split of the layers, offload of activations. PROBLEM may be the report.json of "
        "`pipemorph run`: its measured op times are read from the timeline.json in its folder.",
    )
    parser.add_argument("problem", metavar="PROBLEM", help="YAML or JSON file; - reads stdin")
    add_output_arguments(parser, FORMATS, "text")


def run(args: argparse.Namespace) -> int:
    output = choose_output_format(args, FORMATS, "text")
    problem, source, measured = _load_problem(args.problem)
    advice = compare_changes(problem)
    if output == "json":
        text = json.dumps(advice_to_json(advice, source, measured)) + "\n"
    else:
        text = render_parts(*format_advice(advice, source, measured), out=args.out)
    write_output(text.encode(), args.out)
    return 0


def _load_problem(path: str) -> tuple[Problem, str, float | None]:
    """The problem, the source of its times, and for a run the measured iteration time in ms."""
    from pipemorph.local.results.measured_problem import is_run_report, load_measured_problem

    if is_run_report(path):
        found = load_measured_problem(path)
        return found.problem, found.source, found.iteration_ms
    return load_problem(path), "times of the problem", None


def advice_to_json(advice: Advice, source: str, measured: float | None) -> dict[str, Any]:
    """JSON fields: ``today`` and ``options`` in the same form; times in milliseconds."""
    best = advice.best_option
    return {
        "source": source,
        "measured_iteration_ms": measured,
        "today": _option_to_json(advice.options[0]),
        "options": [_option_to_json(option) for option in advice.options[1:]],
        "best": advice.options.index(best) - 1 if best is not None else None,
        "missing": list(advice.missing_options),
    }


def _option_to_json(option: AdviceOption) -> dict[str, Any]:
    return {
        "lever": option.lever,
        "change": option.change,
        "makespan": round(option.makespan, 9),
        "batch": option.batch,
        "makespan_per_batch": round(option.makespan / option.batch, 9),
        "gain": round(option.gain, 9),
        "bubble_fraction": round(option.bubble_fraction, 9),
        "in_flight_peak": list(option.in_flight),
        "memory": round(option.memory, 9),
        "activation_bytes": option.activation_bytes,
        "host_bytes": option.host_bytes,
        "note": option.note or None,
    }


def format_advice(advice: Advice, source: str, measured: float | None) -> list[RenderableType]:
    """A table of all options, today first, and what is best."""
    rows = [
        (
            option.lever,
            option.change,
            f"{option.makespan:.1f} ms",
            "" if option.lever == "today" else _format_change(option.gain),
            f"{option.bubble_fraction:.1%}",
            _format_memory(option),
            option.note,
        )
        for option in advice.options
    ]
    lines: list[RenderableType] = [
        f"{source}; memory: activations on the rank that needs most",
        make_table(HEADINGS, rows, right=HEADINGS[2:6]),
    ]
    if measured is not None:
        predicted = advice.options[0].makespan
        share = f" ({measured / predicted - 1:+.1%} against the prediction)" if predicted else ""
        lines.append(f"measured today: {measured:.1f} ms{share}")
    lines += [f"- {text}" for text in advice.missing_options]
    best = advice.best_option
    if best is None:
        lines.append("best: no change; with the same batch and memory no option saves 1%")
    else:
        note = f" ({best.note})" if best.note else ""
        lines.append(
            f"best with the same batch and no more memory: {best.lever}, {best.change}{note}:"
            f" {best.gain:.1%} less time per sample"
        )
    return lines


def _format_change(gain: float) -> str:
    """Change of the time per sample; ``-8.3%`` is faster."""
    return f"{-gain:+.1%}" if abs(gain) >= 0.0005 else "same"


def _format_memory(option: AdviceOption) -> str:
    text = f"{option.memory:.2f}×"
    if option.activation_bytes is not None:
        text += f" {_format_bytes(option.activation_bytes)}"
    if option.host_bytes is not None:
        text += f" + {_format_bytes(option.host_bytes)} host"
    return text


def _format_bytes(count: int) -> str:
    size = float(count)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1024:
            return f"{size:.3g} {unit}"
        size /= 1024
    return f"{size:.3g} TiB"
