"""The ingest on a cluster: a process of its own, beside the reconciling one.

``auth`` says who may speak for a job, ``store`` holds the jobs and persists directives,
``summary`` turns a controller into status, ``pace`` says when status is written.
"""
