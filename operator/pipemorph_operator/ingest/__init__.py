"""The ingest on a cluster: a process separate from the reconciler.

``auth`` authenticates the ranks of a job, ``store`` tracks the jobs and persists directives,
``summary`` turns a controller into status, ``write_schedule`` says when status is written,
``job_cache`` holds them for the process that leads next.
"""
