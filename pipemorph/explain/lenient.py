"""What is read of a job's spec, in a report and in a cluster alike, whatever else stands there."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict


class Lenient(BaseModel):
    """Takes what it knows of an object that a later release may have written."""

    model_config = ConfigDict(extra="ignore")


class Trainer(Lenient):
    """``spec.trainer``."""

    iterations: int = 0


class Adaptation(Lenient):
    """``spec.adaptation``."""

    enabled: bool = True
