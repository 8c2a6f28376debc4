"""The job's agent: a process next to rank 0, between the ranks and the ingest.

Rank 0 starts it with :func:`start_agent`; every rank connects to it with :func:`connect_to_agent`.
This package does not import torch, so the process starts in a fraction of a second.
"""

from pipemorph_trainer.agent.agent_process import AgentProcess, start_agent
from pipemorph_trainer.agent.client import AgentClient, connect_to_agent

__all__ = ["AgentClient", "AgentProcess", "connect_to_agent", "start_agent"]
