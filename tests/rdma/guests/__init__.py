"""Virtual machines with Soft-RoCE: real verbs, real packets, real faults, no hardware."""

from guests.fabric import Fabric, Rail
from guests.guest import Done, Guest, GuestError, Task

__all__ = ["Done", "Fabric", "Guest", "GuestError", "Rail", "Task"]
