"""Names that an earlier version accepted, and what to use instead.

A removed name is refused by name with its replacement, never ignored. Each replacement
completes the sentence "was removed; …", as in ``use nodeExclusion``.
"""

from __future__ import annotations

from argparse import ArgumentTypeError
from collections.abc import Callable, Mapping

FIELDS: Mapping[str, str] = {
    "spec.adaptation.allowDelegation": "use transport.route: direct",
    "spec.adaptation.crowdedHosts": "leave it out; a job with faults adapts on crowded hosts, too",
    "spec.adaptation.minDelayFraction": "leave it out; it is 0.25",
    "spec.emulation.inputBytes": "leave it out; emulated stages do not recompute",
    "spec.failurePolicy.latePodSeconds": "leave it out",
    "spec.parallelism.spares": "use minReplicas; a lost pod is replaced in its Job",
    "spec.placement.gang.coscheduling.scheduleTimeoutSeconds": "leave it out; it is 300",
    "spec.placement.nodeExclusion.afterAttempts": "leave it out; it is 2",
    "spec.placement.nodeExclusion.maxNodes": "leave it out; it is 8",
    "spec.placement.rdma.check": "run pipemorph bench link between two hosts before the job",
    "spec.transport.directDuplex": "leave it out, or use Options(direct_duplex=...) of a Pipeline",
    "spec.transport.flightBytes": "leave it out; it is 512 MiB",
    "spec.transport.queues": "leave it out; it is 8",
}
"""Fields of a manifest by their path without indices, as in ``spec.parallelism.stages``. The CRD
has them without a type, so that the operator receives and refuses them."""

VALUES: Mapping[tuple[str, str], str] = {
    ("spec.schedule.dispatch", "online"): "use auto or guided",
    ("spec.transport.engine", "libfabric"): "use auto, or tcp on hosts with EFA devices",
}
"""Values of a field of a manifest, by its path and the value."""

DISPATCHES: Mapping[str, str] = {
    "online": "use guided, or auto in a job",
}
"""Dispatches, in problems and on the command line."""

POLICIES: Mapping[str, str] = {
    "exact": "use pipemorph; lower_bound and gap of its plan bound the distance to the optimum",
}
"""Policies, in manifests and problems and on the command line."""

SPLITS: Mapping[str, str] = {
    "graph": "use auto",
    "module": "use auto",
    "off": "use fused",
}
"""Values of ``split`` of a Pipeline, and of torch's schedules."""

NAMES: Mapping[str, str] = {
    "Part": "use ModelShard",
    "register_linear": "use register_function with the function that the layer calls",
}
"""Names of ``pipemorph_trainer``."""

PROBLEM_FIELDS: Mapping[str, str] = {
    "slots": "leave it out; a sender holds messages until its receiver has room",
}
"""Fields of the entries of a problem file."""

COMMANDS: Mapping[str, str] = {
    "fabric": "use bench link between two hosts, or ib_write_bw of perftest for a port alone",
    "links": "use top JOB or explain JOB",
}
"""Subcommands of ``pipemorph``, as in ``bench link``."""

_PAGE = "the pod of rank 0 serves the page, and the Secret of the page has its token"

ARGUMENTS: Mapping[str, str] = {
    "plan --time-limit": "leave it out",
    "watch --ingest": _PAGE,
    "watch --service-account": _PAGE,
    "timeline --ingest": _PAGE,
    "timeline --service-account": _PAGE,
}
"""Arguments of a subcommand, as in ``run --watch``."""


def describe_removal(replacements: Mapping[str, str], name: str) -> str | None:
    """The end of the message that refuses ``name``; None if it was never accepted."""
    replacement = replacements.get(name)
    return None if replacement is None else f"was removed; {replacement}"


def refuse_removed(replacements: Mapping[str, str]) -> Callable[[str], str]:
    """Argument type (:func:`argparse.ArgumentParser.add_argument`) that refuses removed names."""

    def reject_removed_name(name: str) -> str:
        if gone := describe_removal(replacements, name):
            raise ArgumentTypeError(f"{name!r} {gone}")
        return name

    return reject_removed_name
