"""PipeMorph behind the interface of ``torch.distributed.pipelining``."""

from pipemorph_trainer.torch.splitting import SplitBackward, split_backward

__all__ = ["SplitBackward", "split_backward"]
