"""What operator_scale.py plays, what it prints of it, and which goals hold."""

from __future__ import annotations

import math
import os

from scale_usage import PARTS, Result

MIX = {2: 0.4, 8: 0.4, 64: 0.2}
"""Jobs, by stages."""
BEGIN, QUIET, ONSETS, STORM, CALM = 110.0, 20, 60, 100, 20.0
"""Seconds until the beginning of all jobs at the same moment is over: each is written a first time
then, by both programs. Seconds before the first link turns slow; how many do, one a second; how
many at once, two such pauses later; seconds until the ingest is killed."""
ONSETS_AT = BEGIN + QUIET
STORM_AT = ONSETS_AT + ONSETS + CALM
"""Seconds from the first report."""
LET_BE, RESTART = 1.0, 60.0
"""Seconds in which agents that are not answered are let be before it is, so that no clock need be
exact; and those that are watched after that."""

MOST_OF_PLAIN = 1.2
"""Goal: times a plain Indexed Job."""
MOST_MS = {2: (50.0, 250.0), 8: (50.0, 250.0), 64: (math.inf, 1000.0)}
"""Goals, by stages: p50 and p99 of alarm to directive, one onset a second."""
MOST_STORM, MOST_CORES, MOST_MIB = 10.0, 1.0, 512.0
"""Goals: seconds; processors and memory of the ingest without its planners."""


def table(found: dict[str, Result]) -> str:
    """What docs/benchmarks.md quotes, with what it was measured beside."""
    pods, jobs, fleet, restart = (found[n] for n in ("pods", "jobs", "fleet", "restart"))
    shares = ", ".join(
        f"{name.replace('_', ' ')} {fleet[f'{name}_cores']:.2f}"
        for name in (
            "ingest", "planners", "load_generator", "api_server", "etcd", "operator",
            "controllers", "idle",
        )
    )  # fmt: skip
    rows = [
        (
            f"apply to all {pods['ranks']:.0f} pods of one job; a plain Indexed Job of the same",
            f"{pods['seconds']:.1f} s; {pods['plain_seconds']:.1f} s, {pods['ratio']:.2f}×",
        ),
        (
            f"API requests per job, {jobs['jobs']:.0f} jobs of {sizes_text()} stages",
            f"{jobs['requests_per_job']:.1f}",
        ),
        ("operator's memory then", f"{jobs['memory_mib']:.0f} MiB"),
        ("restarted operator: until each was looked at", f"{jobs['restart_seconds']:.1f} s"),
        (
            "one ingest, all of them connected: reports per second; answered within, p50 / p99",
            f"{fleet['reports_per_second']:.0f};"
            f" {fleet['answer_p50_ms']:.1f} / {fleet['answer_p99_ms']:.0f} ms",
        ),
        (
            "… its processor time per report (of the load generator)",
            f"{fleet['ingest_cpu_us_per_report']:.0f} µs"
            f" ({fleet['load_generator_cpu_us_per_report']:.0f} µs)",
        ),
        ("… its memory", f"{fleet['memory_mib']:.0f} MiB"),
        ("… processors busy", shares),
        (
            "… writes of status a second, by the ingest and by the operator; what they read",
            f"{fleet['ingest_patch_per_second']:.1f}, {fleet['operator_patch_per_second']:.1f};"
            f" {fleet['ingest_get_per_second'] + fleet['operator_get_per_second']:.1f}",
        ),
        *(
            (
                f"a link turns slow in a job a second; of {stages} stages"
                f" ({fleet[f'onsets_{stages}']:.0f}): alarm to directive, p50 / p99",
                f"{fleet[f'onset_{stages}_p50_ms']:.0f} / {fleet[f'onset_{stages}_p99_ms']:.0f} ms",
            )
            for stages in MIX
        ),
        (
            f"in {STORM} jobs at once: p50, and the last directive",
            f"{fleet['storm_p50_ms'] / 1e3:.1f} s, {fleet['storm_last_seconds']:.1f} s",
        ),
        *(
            (
                f"… of that, {what}: the report, the wait for a planner, the decision, its way to"
                " the agent; after it, the write to status; p50 / p99",
                ", ".join(
                    f"{fleet[f'{phase}_{part}_p50_ms']:.0f} / {fleet[f'{phase}_{part}_p99_ms']:.0f}"
                    for part in PARTS
                )
                + " ms",
            )
            for phase, what in (
                *((f"onset_{stages}", f"{stages} stages, one a second") for stages in MIX),
                ("storm", "at once"),
            )
        ),
        (
            "… processor time of a decision, and how many there were",
            f"{fleet['planner_cpu_ms']:.0f} ms, {fleet['decisions']:.0f}",
        ),
        (
            "… latest report of the load generator; agents that were hung up on",
            f"{fleet['load_generator_late_ms']:.0f} ms; {fleet['reconnects']:.0f}",
        ),
        (
            "ingest and operator killed and started: half, and all of them are answered again;"
            " the operator has looked at all",
            f"{restart['p50_seconds']:.1f} s, {restart['last_seconds']:.1f} s;"
            f" {restart['operator_seconds']:.1f} s",
        ),
    ]
    lines = ["| operator and ingest at scale | |", "|---|---:|"]
    lines += [f"| {what} | {figure} |" for what, figure in rows]
    lines += [
        "",
        f"{os.cpu_count() or 0} processors, which everything shares, the load generator and the"
        " control plane included; load average before the first report"
        f" {fleet['machine_load_before']:.1f}. No kubelets. {fleet['drawn']:.0f} slow links were"
        f" drawn, of which {fleet['asked']:.0f} ask for another plan at once.",
    ]
    return "\n".join(lines)


def sizes_text() -> str:
    *some, last = MIX
    return f"{', '.join(map(str, some))} and {last}"


def goals(found: dict[str, Result]) -> list[tuple[str, bool]]:
    """What is promised with what was measured, and whether it holds."""
    pods, fleet, restart = found["pods"], found["fleet"], found["restart"]
    kept = [
        (
            f"apply to all {pods['ranks']:.0f} pods ≤ {MOST_OF_PLAIN} × a plain Indexed Job:"
            f" {pods['ratio']:.2f}",
            pods["ratio"] <= MOST_OF_PLAIN,
        ),
    ]
    for stages, most in MOST_MS.items():
        for quantile_, limit in zip(("p50", "p99"), most, strict=True):
            value = fleet[f"onset_{stages}_{quantile_}_ms"]
            if limit < math.inf:
                kept.append(
                    (
                        f"alarm to directive, {stages} stages, {quantile_} ≤ {limit:.0f} ms:"
                        f" {value:.0f}",
                        value <= limit,
                    )
                )
    unasked = fleet["directives_unasked"]
    missing = {
        "before the storm": fleet["directives_missing_onsets"],
        "of the storm before the restart": fleet["directives_missing_storm"],
        "at the end": fleet["directives_missing_end"],
    }
    return [
        *kept,
        (
            f"{STORM} jobs at once, the last directive ≤ {MOST_STORM:.0f} s:"
            f" {fleet['storm_last_seconds']:.1f}",
            fleet["storm_last_seconds"] <= MOST_STORM,
        ),
        (
            f"ingest without its planners ≤ {MOST_CORES:g} processor: {fleet['ingest_cores']:.2f}",
            fleet["ingest_cores"] <= MOST_CORES,
        ),
        (
            f"its memory ≤ {MOST_MIB:.0f} MiB: {fleet['memory_mib']:.0f}",
            fleet["memory_mib"] <= MOST_MIB,
        ),
        *(
            (f"slow links of {fleet['asked']:.0f} without a directive {when} = 0: {n:.0f}", not n)
            for when, n in missing.items()
        ),
        (f"directives before an alarm = 0: {unasked:.0f}", not unasked),
        (
            f"jobs that are not answered within {RESTART:.0f} s of a restart = 0:"
            f" {restart['missing']:.0f}",
            not restart["missing"],
        ),
    ]
