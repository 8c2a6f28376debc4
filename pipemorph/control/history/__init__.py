"""History of a job: iterations, changes of plan and the time they saved, recoveries, goodput."""
