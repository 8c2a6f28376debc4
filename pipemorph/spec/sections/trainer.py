"""``spec.trainer``, ``spec.emulation`` and ``spec.checkpoint``: program and state of the ranks."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field, model_validator

from pipemorph.spec.base import FieldError, SpecModel
from pipemorph.spec.sections.schedule import StageTime

MODULE = r"^[A-Za-z_]\w*(\.[A-Za-z_]\w*)*$"


class Trainer(SpecModel):
    """Program that runs in every rank: a module or a command."""

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
        '`[python, train.py, --lr, "3e-4"]`. It runs without a shell. On one machine, `python` is '
        "the interpreter of `pipemorph`.",
    )
    preload: list[Annotated[str, Field(pattern=MODULE, max_length=253)]] = Field(
        default_factory=lambda: ["pipemorph_trainer.launcher.preload"],
        max_length=64,
        description="Python modules that the launcher of the ranks imports once, before it forks "
        "them: a rank of `module`, or of a command `python ...`, then starts in milliseconds. They "
        "must start no thread and use no device. Empty: every rank is a separate program.",
    )
    args: dict[str, Any] = Field(
        default_factory=dict,
        description="Arguments, passed as JSON in PIPEMORPH_ARGS, or in the job's file if longer"
        " than 100 KiB; at most 512 KiB.",
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
    def _check_one_program(self) -> Trainer:
        if (self.module is None) == (self.command is None):
            found = "neither" if self.module is None else "both"
            raise FieldError("", f"has {found} of module and command; give one of them")
        return self

    def build_argv(self, python: str) -> list[str]:
        """Program of a rank and its arguments; ``python``: interpreter to use for that name."""
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
        description="Bytes that an emulated microbatch reports as held between its F and its W.",
    )
    gradient_bytes: int | None = Field(
        default=None,
        ge=1,
        le=1 << 30,
        description="Bytes of gradients per stage that replicas reduce. Default: none.",
    )


class Checkpoint(SpecModel):
    """Folder and interval of checkpoints (torch.distributed.checkpoint)."""

    directory: str = Field(min_length=1)
    every: int = Field(ge=1, description="Iterations between checkpoints.")
    resume: bool = Field(
        default=True, description="Continue from the newest undamaged checkpoint in the folder."
    )
    keep: int = Field(default=2, ge=1, description="Number of newest checkpoints to preserve.")
    asynchronous: bool = Field(
        default=False,
        alias="async",
        description="Write during training, from a copy in host memory.",
    )
