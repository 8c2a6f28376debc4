"""Labels, annotations, condition types, reasons and field owners, each defined once.

Programs may depend on reasons, so reasons never change. Messages are for people and may change.
"""

from __future__ import annotations

import os

from pipemorph.spec.job_spec import API_GROUP, API_VERSION, KIND
from pipemorph.views.status.condition_names import *  # noqa: F403  # Conditions that the ingest makes.

__all__ = ["API_GROUP", "API_VERSION", "KIND"]

PLURAL = "pipemorphjobs"
VERSION = "v1alpha1"

CONTROLLER = f"{API_GROUP}/operator"
"""Value of ``spec.managedBy`` for jobs that this operator reconciles."""

OPERATOR_OWNER = "pipemorph-operator"
INGEST_OWNER = "pipemorph-ingest"
"""Field owners of server-side apply; each process owns its part of status."""

# --- labels and annotations ---------------------------------------------------------------

LABEL_JOB = f"{API_GROUP}/job-name"
LABEL_JOB_UID = f"{API_GROUP}/job-uid"
LABEL_ATTEMPT = f"{API_GROUP}/attempt"
LABEL_LEADER = f"{API_GROUP}/leader"
"""Label of the ingest's pod that leads, which its Service selects."""
AUTHORITIES = f"{API_GROUP}/authorities"
"""Annotation of a Job: fingerprints of the authorities that its ranks trust."""
LABEL_REPLACED = f"{API_GROUP}/replaced"
"""Label of a lost pod that the Job replaces."""
JOB_FINALIZER = "batch.kubernetes.io/job-tracking"
"""Finalizer of a pod until the Job controller has counted its end."""
COMPLETION_INDEX = "batch.kubernetes.io/job-completion-index"
"""Annotation and label of a pod; rank = completion index."""

KUEUE_PREFIX = "kueue.x-k8s.io/"
KUEUE_QUEUE = f"{KUEUE_PREFIX}queue-name"
KUEUE_PRIORITY = f"{KUEUE_PREFIX}priority-class"
KUEUE_REQUIRED_TOPOLOGY = f"{KUEUE_PREFIX}podset-required-topology"
KUEUE_PREFERRED_TOPOLOGY = f"{KUEUE_PREFIX}podset-preferred-topology"
KUEUE_SLICE_TOPOLOGY = f"{KUEUE_PREFIX}podset-slice-required-topology"
KUEUE_SLICE_SIZE = f"{KUEUE_PREFIX}podset-slice-size"
VOLCANO_GROUP = "scheduling.k8s.io/group-name"
COSCHEDULING_GROUP = "scheduling.x-k8s.io/pod-group"
MULTUS_NETWORKS = "k8s.v1.cni.cncf.io/networks"
HOSTNAME_KEY = "kubernetes.io/hostname"

# --- condition types ----------------------------------------------------------------------

SUSPENDED = "Suspended"
PODS_READY = "PodsReady"
RUNNING = "Running"
PREFLIGHT_PASSED = "PreflightPassed"
COMPLETE = "Complete"
FAILED = "Failed"
READY = "Ready"
RECONCILING = "Reconciling"
STALLED = "Stalled"
KSTATUS_CONDITIONS = (READY, RECONCILING, STALLED)
"""Conditions for generic readers of status (kstatus, ``kubectl wait``), derived from the others."""
OPERATOR_CONDITIONS = (
    SUSPENDED,
    PODS_READY,
    RUNNING,
    PREFLIGHT_PASSED,
    COMPLETE,
    FAILED,
    *KSTATUS_CONDITIONS,
)
INGEST_FIELDS = (
    "training",
    "control",
    "recoveries",
    "goodput",
    "goodput_percent",
    "useful_time",
)
"""Fields of :class:`~pipemorph.spec.job_status.JobStatus` that only the ingest writes."""

# --- reasons ------------------------------------------------------------------------------

R_CREATED = "AttemptStarted"
R_WAITING_FOR_PODS = "WaitingForPods"
R_PODS_REFUSED = "PodsRefused"
R_ALL_READY = "AllRanksReady"
R_QUEUED = "WaitingForAdmission"
R_SUSPENDED = "SuspendedBySpec"
R_SUSPENDING = "RanksStopping"
R_NOT_SUSPENDED = "NotSuspended"
R_RESTARTING = "Restarting"
R_DRAINING = "WaitingForOldRanks"
R_FINISHING = "ContainersRunOn"
"""Reason after all ranks have finished, but not the other containers of their pods."""
R_COMPLETED = "AllRanksFinished"
R_WITHOUT_PODS = "FinishedWithoutPods"
"""Reason after all ranks have finished, but some pods never ran: the Job would wait for them."""

R_INVALID_SPEC = "InvalidSpec"
R_PLANNING = "Planning"
R_NO_IMAGE = "NoTrainerImage"
R_REFUSED = "ObjectRefused"
R_INTERNAL = "InternalError"
R_STATUS_REFUSED = "StatusRefused"
R_DEADLINE = "DeadlineExceeded"
R_MAX_RESTARTS = "MaxRestartsExceeded"
R_RANK_FAILED = "RankFailed"
R_INVALID_INPUT = "InvalidInput"
R_PREFLIGHT_FAILED = "PreflightFailed"
R_PREFLIGHT_PASSED = "AllRanksChecked"
R_PREFLIGHT_UNKNOWN = "NotYetChecked"
R_DISRUPTED = "Disrupted"
R_REJECTED = "PodRejected"
"""Reason if a node rejected a pod, such as for lack of a device."""
R_POD_FAILED = "PodFailed"
R_OBJECT_LOST = "ObjectDeleted"
R_RESTORED = "ObjectRestored"
R_SAVED = "SavedAndEnded"
R_EVICTED = "Evicted"
R_JOB_LOST = "JobDeleted"
R_NODE_EXCLUDED = "NodeExcluded"
R_NODE_ACCUSED = "NodeAccused"
R_IDLE_GPUS = "IdleGPUs"
R_SMALL_SHM = "SmallSharedMemory"
R_TTL = "TTLExpired"

R_POD_REPLACED = "PodReplaced"
R_RANKS_RESTARTED = "RanksRestarted"
R_RECOVERED = "Recovered"
R_LAYOUT_CHANGED = "LayoutChanged"
R_OTHER_AUTHORITY = "OtherAuthority"

# --- exit codes of a rank -----------------------------------------------------------------

EXIT_INVALID_INPUT = 2
"""Exit code for invalid input: a restart would fail the same way, so there is none."""
EXIT_PREFLIGHT = os.EX_CONFIG
"""Exit code of the preflight for an unfit pod."""
