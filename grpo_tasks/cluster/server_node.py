"""The actor of one rollout server: vLLM in its own environment on the node, and a receiver of weights next to it.

The actor starts a server that has ended again, at the same address, where the trainer's engine finds it. If that fails, or the
actor or its node ends, the driver starts another one elsewhere (servers.py).
"""

import os
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from threading import Thread

from ray.util import get_node_ip_address

from grpo_tasks.cluster.node import Node
from grpo_tasks.cluster.parcel import BASE, ParcelFile, ServerAddress
from grpo_tasks.processes.lifetime import PARENT
from grpo_tasks.processes.ports import free_port
from grpo_tasks.processes.serve import tail
from grpo_tasks.rollout.vllm_server import OwnServer, ServerModel
from schemas.config.rollout import VllmConfig
from schemas.errors import RolloutError
from schemas.paths import resolve

KEY = "VLLM_API_KEY"
SETTLED_S = 60.0
"""A receiver that ends within so many seconds would end again."""


class ServerNode(Node):
    """One rollout server on a node.

    Args:
        key: what requests must carry. The server listens on the address of the node and nowhere else.
    """

    def __init__(self, key: str) -> None:
        address = get_node_ip_address()
        super().__init__(address)
        os.environ[KEY] = key
        self._server: OwnServer | None = None
        self._receiver: subprocess.Popen[bytes] | None = None
        self._receives_at, self._receives_since = "", 0.0
        self._restart: Thread | None = None
        self._fault: RolloutError | None = None

    def start(self, files: tuple[ParcelFile, ...], path: str, config: VllmConfig, served: ServerModel) -> ServerAddress:
        """Lay out the base model and start the server.

        Args:
            files: of the base model, all of them received; none if `path` names an embedded model or one of the hub.
            path: the base model as the driver names it.
            config: settings of the server.
            served: the model; its folder is replaced by that of this node.

        Raises:
            RolloutError: there is no vLLM environment here, or the server or the receiver does not come up.
        """
        if not Path(config.python).exists():
            raise RolloutError(
                f"there is no {config.python} on {self._address}",
                place="rollout.vllm.python",
                fix="run `make vllm` on every node that has a server, and name the same path on all of them",
            )
        self._store.lay_out(files)
        model = self._root / BASE if files else Path(resolve(path))
        # Not before: the base model may have travelled for minutes, in which another process could have taken the port.
        self._receives_at = f"http://{self._address}:{free_port(self._address)}"
        self._receive_weights()
        self._server = OwnServer(config, replace(served, model=model), self._root / "vllm.log", host=self._address)
        self._server.start()
        self._tend_receiver()
        return ServerAddress(self._server.address, self._receives_at)

    def tend(self) -> str:
        """Start again what has ended; the driver asks this regularly. Returns what happened, empty if nothing did.

        Raises:
            RolloutError: the server cannot be started again, or the receiver ends at once.
        """
        assert self._server is not None
        happened = self._tend_receiver()
        if self._restart is not None and self._restart.is_alive():
            return happened
        if self._fault is not None:
            raise self._fault
        if self._server.runs:
            return happened
        # In a thread: a start takes a minute, and the driver must not take this actor for dead meanwhile.
        self._restart = Thread(target=self._start_again, args=(self._server,), daemon=True)
        self._restart.start()
        ended = f"the rollout server at {self._server.address} ended and is started again"
        return f"{happened}; {ended}" if happened else ended

    def _start_again(self, server: OwnServer) -> None:
        try:
            server.restart()
        except Exception as error:  # in a thread: `tend` raises it
            detail = error.message if isinstance(error, RolloutError) else repr(error)
            self._fault = RolloutError(f"the server cannot be started again: {detail}", place=server.address)

    def _tend_receiver(self) -> str:
        assert self._receiver is not None
        code = self._receiver.poll()
        if code is None:
            return ""
        ended = f"the receiver of weights ended with exit code {code}"
        if time.monotonic() - self._receives_since < SETTLED_S:
            raise RolloutError(f"{ended}; the end of its log:\n{tail(self._receiver_log)}", place=self._receives_at)
        self._receive_weights()
        return f"{ended} and is started again at {self._receives_at}"

    @property
    def _receiver_log(self) -> Path:
        return self._root / "weights.log"

    def _receive_weights(self) -> None:
        self._receives_since = time.monotonic()
        host, _, port = self._receives_at.removeprefix("http://").rpartition(":")
        module = "grpo_tasks.operating.weights_server"
        with self._receiver_log.open("ab") as output:
            self._receiver = subprocess.Popen(
                [sys.executable, "-P", "-m", module, str(self._root / "weights"), host, port],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env=os.environ | {PARENT: str(os.getpid())},
            )
