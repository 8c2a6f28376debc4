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
    "spec": "The job to run. Immutable except suspend, adaptation, failurePolicy, recovery, "
    "placement, template, activeDeadlineSeconds and ttlSecondsAfterFinished; a new recovery, "
    "placement or template applies from the next attempt.",
    "spec.parallelism": "Division of the job into ranks: sizes and order of the device mesh. "
    "Immutable.",
    "spec.schedule": "Work of an iteration and the policy that schedules it. Immutable.",
    "spec.schedule.policy": "pipemorph adapts to slow links; 1f1b, gpipe and zero-bubble never "
    "change their schedule.",
    "spec.schedule.dispatch": "static: each stage runs its ops in the plan's order; guided: it "
    "runs the first ready op in the plan's order, with no more microbatches in flight than "
    "the plan has; auto: static, or guided where that is predicted to be better.",
    "spec.schedule.warmup[]": "Warm-up of one stage; at most that of the stage before.",
    "spec.trainer": "Program that runs in every rank. Immutable.",
    "spec.trainer.seed": "Seed for the module to use; nothing else is seeded.",
    "spec.adaptation": "Conditions for changing to a new plan.",
    "spec.adaptation.enabled": "Whether schedule and routes may change.",
    "spec.transport": "Data exchange between stages. Immutable.",
    "spec.transport.rdma": "Use of RDMA devices by the transfer engine.",
    "spec.emulation": "Emulated stages, which hold the interpreter for a set time instead of "
    "computing. Immutable.",
    "spec.checkpoint": "Folder and interval of checkpoints. Immutable.",
    "spec.checkpoint.directory": "Folder that every rank can write, such as on a shared volume.",
    "spec.faults": "Faults to inject into the transport, to test adaptation. Immutable.",
    "spec.faults[]": "One fault: one or more effects, bounded by iterations or by seconds.",
    "spec.faults[].link": "Link between stage link and stage link + 1.",
    "spec.faults[].fromIteration": "First iteration with the fault.",
    "spec.faults[].toIteration": "First iteration after the fault.",
    "spec.faults[].fromSeconds": "Start, seconds since training began.",
    "spec.faults[].toSeconds": "End, seconds since training began.",
    "spec.template": "Pod template of every rank; its container trainer runs the stage. Without "
    "a command it runs the program of spec.trainer. The operator sets RANK and similar variables.",
    "spec.failurePolicy": "Reaction to a failed attempt.",
    "spec.failurePolicy.maxRestarts": "Coordinated restarts of all ranks before the job is "
    "Failed. Evictions and lost nodes do not count.",
    "spec.suspend": "true stops the ranks without deleting the job; false starts a new attempt.",
    "spec.managedBy": "Controller of the job: empty or pipemorph.io/operator is this operator, "
    "which ignores jobs with other values. Immutable.",
    "spec.activeDeadlineSeconds": "Time limit of all attempts together; after it the job is "
    "Failed. Time in suspension does not count.",
    "spec.ttlSecondsAfterFinished": "Seconds until a finished job and its objects are deleted.",
    "spec.template.metadata": "Labels and annotations of every pod.",
    "spec.template.spec": "Pod spec as in Kubernetes.",
    "spec.template.spec.containers": "Containers; the one named trainer runs the stage.",
    "spec.template.spec.containers[]": "Container as in Kubernetes.",
    "spec.template.spec.containers[].name": "Name of the container.",
    "spec.template.spec.containers[].env": "Environment; RANK, WORLD_SIZE, MASTER_ADDR, "
    "PIPEMORPH_* and similar names are reserved.",
    "spec.template.spec.containers[].env[]": "Variable as in Kubernetes.",
    "spec.template.spec.containers[].env[].name": "Name of the variable.",
    **{f"spec.schedule.stageTimes[].{k}": v for k, v in STAGE_TIME.items()},
    **{f"spec.emulation.stageTimes[].{k}": v for k, v in STAGE_TIME.items()},
    "spec.placement.networks[]": "Multus network attachment.",
    "spec.placement.excludeNodes[]": "Name of a node.",
}
