"""Free ports, from the room that has them."""

from grpo_tasks.processes.ports import free_ports

__all__ = ["free_ports"]
