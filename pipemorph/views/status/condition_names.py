"""Types and reasons of the conditions that describe training.

Programs may depend on reasons, so they never change; messages are for people and may change.
"""

LINKS_HEALTHY = "LinksHealthy"
SCHEDULE_ADAPTED = "ScheduleAdapted"
LINKS_DELEGATED = "LinksDelegated"
RAILS_HEALTHY = "RailsHealthy"
STAGES_EVEN = "StagesEven"
REDUCTIONS_HEALTHY = "ReductionsHealthy"
REPLICAS_COMPLETE = "ReplicasComplete"
INGEST_CONDITIONS = (
    LINKS_HEALTHY,
    SCHEDULE_ADAPTED,
    LINKS_DELEGATED,
    RAILS_HEALTHY,
    STAGES_EVEN,
    REDUCTIONS_HEALTHY,
    REPLICAS_COMPLETE,
)

R_FINISHED = "JobFinished"
R_LINKS_OK = "AllLinksHealthy"
R_LINKS_SLOW = "SlowLinks"
R_REDUCTIONS_OK = "ReductionsAsUsual"
R_REPLICAS_ALL = "AllReplicas"
R_REPLICAS_FEWER = "FewerReplicas"
R_REDUCTIONS_SLOW = "SlowReductions"
R_NO_REPORTS = "NoReportsYet"
R_STALE = "ReportsStale"
R_LINKS_UNKNOWN = "NoRecentSamples"
R_STAGES_EVEN = "NoStageSlow"
R_STAGES_UNEQUAL = "UnequalWork"
R_STAGES_SLOW = "SlowStages"
R_STAGES_UNMEASURED = "StagesNotMeasured"
R_RAILS_OK = "PortsActive"
R_RAILS_SICK = "SickPorts"
R_RAILS_CONGESTED = "NetworkCongested"
R_FELL_BACK = "LinksFellBack"
R_NO_RDMA = "NoRdmaDevices"
R_PORTS_UNREPORTED = "PortsNotReported"
R_PORTS_UNSEEN = "CountersUnavailable"
R_ADAPTED = "PlanInEffect"
R_ADAPTING = "PlanPending"
R_INITIAL_PLAN = "InitialPlan"
R_HELD_BACK = "PlanHeldBack"
R_RETURNED = "ReturnedToInitialPlan"
R_DELEGATED = "LinksDelegated"
R_DIRECT = "AllLinksDirect"
R_FIXED_ROUTE = "RouteFixedBySpec"
