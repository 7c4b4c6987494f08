"""Free ports, from the room that has them."""

from grpo_tasks.processes.serve import free_ports

__all__ = ["free_ports"]
