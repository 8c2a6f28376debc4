"""The job's agent: a process beside rank 0, between the ranks and the ingest.

Rank 0 starts it with :func:`start_agent`; every rank connects to it with :func:`connect`. This
package does not import torch, so the process starts in a fraction of a second.
"""

from pipemorph_trainer.agent.client import AgentClient, connect
from pipemorph_trainer.agent.launch import AgentHandle, start_agent

__all__ = ["AgentClient", "AgentHandle", "connect", "start_agent"]
