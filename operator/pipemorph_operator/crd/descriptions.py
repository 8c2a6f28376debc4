"""Descriptions for ``kubectl explain`` of fields whose models have none.

A test checks that every field of the CRD is described, here or in its model.
"""

from __future__ import annotations

STAGE_TIME = {
    "forward": "Forward op, milliseconds per microbatch.",
    "backwardInput": "Backward for the input, milliseconds per microbatch.",
    "backwardWeight": "Backward for the weights, milliseconds per microbatch.",
}

DESCRIPTIONS: dict[str, str] = {
    "spec": "What to run. Immutable except suspend, adaptation, failurePolicy, recovery, "
    "placement, template, activeDeadlineSeconds and ttlSecondsAfterFinished; a new recovery, "
    "placement or template applies from the next attempt.",
    "spec.parallelism": "How the ranks are divided: the sizes and order of the device mesh. "
    "Immutable.",
    "spec.schedule": "What is scheduled, and by which policy. Immutable.",
    "spec.schedule.policy": "pipemorph adapts to slow links; 1f1b, gpipe and zero-bubble keep "
    "their schedule.",
    "spec.schedule.dispatch": "static: each stage keeps the plan's order; guided: of "
    "its ready ops it runs the first in the plan's order, with no more microbatches in flight than "
    "the plan has; auto: static, or guided where that is predicted to be better.",
    "spec.schedule.warmup[]": "Warm-up of one stage; never more than that of the stage before.",
    "spec.trainer": "What runs in every rank. Immutable.",
    "spec.trainer.seed": "Seed for the module to use; nothing else is seeded.",
    "spec.adaptation": "When to change to a new plan.",
    "spec.adaptation.enabled": "Whether the schedule and routes may change at all.",
    "spec.transport": "How stages exchange data. Immutable.",
    "spec.transport.rdma": "How the transfer engine uses RDMA devices.",
    "spec.emulation": "Emulated stages, which hold the interpreter for a set time instead of "
    "computing. Immutable.",
    "spec.checkpoint": "Where and how often state is saved. Immutable.",
    "spec.checkpoint.directory": "Folder every rank can write, as on a shared volume.",
    "spec.faults": "Faults to inject into the transport, to test adaptation. Immutable.",
    "spec.faults[]": "One fault: one effect or several, bounded by iterations or by seconds.",
    "spec.faults[].link": "Link between stage link and stage link + 1.",
    "spec.faults[].fromIteration": "First iteration with the fault.",
    "spec.faults[].toIteration": "First iteration without it again.",
    "spec.faults[].fromSeconds": "Start, seconds since training began.",
    "spec.faults[].toSeconds": "End, seconds since training began.",
    "spec.template": "Pod template of every rank; its container trainer runs the stage. Without "
    "a command it runs what spec.trainer says. The operator sets RANK and similar variables.",
    "spec.failurePolicy": "What happens when an attempt fails.",
    "spec.failurePolicy.maxRestarts": "Coordinated restarts of all ranks before the job is "
    "Failed. Evictions and lost nodes do not count.",
    "spec.suspend": "true stops the ranks and keeps the job; false starts a new attempt.",
    "spec.managedBy": "Controller of the job: empty or pipemorph.io/operator is this operator, "
    "which ignores jobs with other values. Immutable.",
    "spec.activeDeadlineSeconds": "Seconds all attempts may take together; then the job is "
    "Failed. Time in suspension does not count.",
    "spec.ttlSecondsAfterFinished": "Seconds until a finished job is deleted, with all it owns.",
    "spec.template.metadata": "Labels and annotations of every pod.",
    "spec.template.spec": "Pod spec, as Kubernetes has it.",
    "spec.template.spec.containers": "Containers; the one named trainer runs the stage.",
    "spec.template.spec.containers[]": "A container, as Kubernetes has it.",
    "spec.template.spec.containers[].name": "Name of the container.",
    "spec.template.spec.containers[].env": "Environment; RANK, WORLD_SIZE, MASTER_ADDR, "
    "PIPEMORPH_* and similar names are reserved.",
    "spec.template.spec.containers[].env[]": "A variable, as Kubernetes has it.",
    "spec.template.spec.containers[].env[].name": "Name of the variable.",
    **{f"spec.schedule.stageTimes[].{k}": v for k, v in STAGE_TIME.items()},
    **{f"spec.emulation.stageTimes[].{k}": v for k, v in STAGE_TIME.items()},
    "spec.placement.networks[]": "A Multus network attachment.",
    "spec.placement.excludeNodes[]": "Name of a node.",
}
