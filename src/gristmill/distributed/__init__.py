"""What runs over a process group of `torch.distributed`."""

from gristmill.distributed.vocab_parallel import vocab_parallel_cross_entropy

__all__ = ["vocab_parallel_cross_entropy"]
