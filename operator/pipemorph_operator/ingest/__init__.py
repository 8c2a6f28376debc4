"""The ingest on a cluster: a process separate from the reconciler.

``auth`` authenticates the ranks of a job, ``store`` tracks the jobs, persists directives and holds
jobs for the process that leads next, ``summary`` turns a controller into status, and
``write_schedule`` says when status is written.
"""
