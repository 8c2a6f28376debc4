"""``spec.trainer``, ``spec.emulation`` and ``spec.checkpoint``: what ranks run and save."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field, model_validator

from pipemorph.api.base import FieldError, SpecModel
from pipemorph.api.sections.schedule import StageTime

MODULE = r"^[A-Za-z_]\w*(\.[A-Za-z_]\w*)*$"


class Trainer(SpecModel):
    """What runs in every rank: a module or a command."""

    module: str | None = Field(
        default=None,
        pattern=MODULE,
        max_length=253,
        description="Python module, run as `python -m MODULE` on every rank.",
    )
    command: list[Annotated[str, Field(max_length=4096)]] | None = Field(
        default=None,
        min_length=1,
        max_length=256,
        description="Program and its arguments, run on every rank instead of a module: "
        '`[python, train.py, --lr, "3e-4"]`. No shell reads it. On one machine `python` is the one '
        "that runs `pipemorph`.",
    )
    preload: list[Annotated[str, Field(pattern=MODULE, max_length=253)]] = Field(
        default_factory=lambda: ["pipemorph_trainer.launcher.preload"],
        max_length=64,
        description="Python modules that the launcher of the ranks imports once, before it forks "
        "them: a rank of `module`, or of a command `python ...`, then starts in milliseconds. They "
        "must start no thread and use no device. Empty: every rank is a program of its own.",
    )
    args: dict[str, Any] = Field(
        default_factory=dict,
        description="Arguments, passed as JSON in PIPEMORPH_ARGS, or in the job's file if they are"
        " longer than 100 KiB; at most 512 KiB.",
    )
    iterations: int = Field(ge=1, description="Iterations to train.")
    seed: int = Field(default=0, ge=0)
    threads: int = Field(default=1, ge=1, le=1024, description="torch intra-op threads per rank.")
    metrics_port: int = Field(
        default=9464,
        ge=0,
        le=65535,
        description="Port of each rank's Prometheus metrics in its pod; 0 disables them. Ignored "
        "on one machine.",
    )

    @model_validator(mode="after")
    def _one_program(self) -> Trainer:
        if (self.module is None) == (self.command is None):
            found = "neither" if self.module is None else "both"
            raise FieldError("", f"has {found} of module and command; give one of them")
        return self

    def argv(self, python: str) -> list[str]:
        """The program of a rank and its arguments; ``python``: the interpreter that it means."""
        program, *rest = self.command or ("python", "-m", str(self.module))
        return [python if program == "python" else program, *rest]


class Emulation(SpecModel):
    """Emulated stages, which hold the interpreter for a set time instead of computing."""

    stage_times: list[StageTime] = Field(
        min_length=1, max_length=512, description="One for all stages, or one per stage."
    )
    message_bytes: int = Field(ge=1, le=1 << 30, description="Bytes sent per message.")
    stands_for_bytes: int | None = Field(
        default=None, ge=1, description="Message size of the emulated model, if scaled down."
    )
    activation_bytes: int | None = Field(
        default=None,
        ge=1,
        description="Bytes that an emulated microbatch reports to hold between its F and its W.",
    )
    gradient_bytes: int | None = Field(
        default=None,
        ge=1,
        le=1 << 30,
        description="Bytes of gradients per stage that replicas reduce. Default: none.",
    )


class Checkpoint(SpecModel):
    """Where and how often state is saved (torch.distributed.checkpoint)."""

    directory: str = Field(min_length=1)
    every: int = Field(ge=1, description="Iterations between checkpoints.")
    resume: bool = Field(
        default=True, description="Continue from the newest checkpoint there that is not damaged."
    )
    keep: int = Field(default=2, ge=1, description="Newest checkpoints of this run to keep.")
    asynchronous: bool = Field(
        default=False,
        alias="async",
        description="Write while training goes on, from a copy in host memory.",
    )
