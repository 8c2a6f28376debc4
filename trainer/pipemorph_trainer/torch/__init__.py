"""PipeMorph behind the interface of ``torch.distributed.pipelining``."""

from pipemorph_trainer.torch.schedule import AdaptiveSchedule
from pipemorph_trainer.torch.split_backward import SplitBackward, split_backward

__all__ = ["AdaptiveSchedule", "SplitBackward", "split_backward"]
