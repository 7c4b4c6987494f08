"""One rank hands the weights to the servers for all ranks of a stage. Otherwise traffic would grow with the number of ranks.

    every rank    waits until none of its requests runs; all wait for each other
    rank 0        sends, loads and probes; then it tells the others the name of the weights and who has them
    the others    ask under that name; only their probe travels

A server that rank 0 did not reach, or that was restarted since, gets the weights from each rank that needs it, under a name that
no other rank uses. So a server that fails keeps no rank from going on, and no rank has to wait for another one's repair.
"""

from collections.abc import Callable
from typing import Any

from grpo_tasks.replicas.pool import Pool
from grpo_tasks.rollout.vllm_server import VllmServer


class OneSender:
    """The part of one rank.

    Args:
        rank: number of this rank, from 0.
        gather: from an item of this rank to the items of all ranks, in their order; every rank has to call it.
    """

    def __init__(self, rank: int = 0, gather: Callable[[Any], list[Any]] = lambda mine: [mine]) -> None:
        self._rank, self._gather = rank, gather
        self.name = ""
        """Name of the weights that rank 0 has loaded; used on a rank that has not loaded them itself."""
        self._given: set[str] = set()

    def gave(self, server: VllmServer) -> bool:
        """Whether rank 0 has loaded the present weights into this server for this rank."""
        return server.address in self._given

    def forget(self, server: VllmServer) -> None:
        """The server has lost what rank 0 had loaded."""
        self._given.discard(server.address)

    def hand_over(self, pool: Pool[VllmServer], name: str) -> None:
        """Load the weights with this rank's name `name` into the servers of its pool; every rank has to call it.

        Raises:
            RolloutError: no server takes them.
        """
        self._given = set()
        pool.drain()
        # A request of another rank must not lose the weights that it is sampled from.
        self._gather(None)
        if self._rank == 0:
            pool.refresh()
        served = (name, [server.address for server in pool.serving]) if self._rank == 0 else None
        given = self._gather(served)[0]
        if self._rank > 0:
            self.name, self._given = given[0], set(given[1])
            pool.refresh()
