"""The actor of one rollout server: vLLM in its own environment on the node, and a receiver of weights next to it.

The actor starts a server that has ended again, at the same address, where the trainer's engine finds it. If the actor or its node
ends, the driver starts another one elsewhere (servers.py).
"""

import os
import subprocess
import sys
from pathlib import Path
from threading import Thread

from ray.util import get_node_ip_address

from grpo_tasks.cluster.node import Node
from grpo_tasks.cluster.parcel import BASE, ParcelFile, ServerAddress
from grpo_tasks.processes.lifetime import PARENT
from grpo_tasks.processes.ports import free_port
from grpo_tasks.rollout.vllm_server import OwnServer, ServedModel
from schemas.config.rollout import VllmConfig
from schemas.errors import RolloutError
from schemas.paths import resolve

KEY = "VLLM_API_KEY"


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
        self._receives_at = f"http://{address}:{free_port()}"
        self._restart: Thread | None = None
        self._fault = ""

    def start(self, files: tuple[ParcelFile, ...], path: str, config: VllmConfig, served: ServedModel) -> ServerAddress:
        """Lay out the base model and start the server.

        Args:
            files: of the base model, all of them received; none if `path` names an embedded model or one of the hub.
            path: the base model as the driver names it.
            config: settings of the server.
            served: the model; its folder is replaced by that of this node.

        Raises:
            RolloutError: there is no vLLM environment here, or the server does not come up.
        """
        if not Path(config.python).exists():
            raise RolloutError(
                f"there is no {config.python} on {self._address}",
                place="rollout.vllm.python",
                fix="run `make vllm` on every node that has a server, and name the same path on all of them",
            )
        self._store.lay_out(files)
        model = self._root / BASE if files else Path(resolve(path))
        here = ServedModel(model, served.dtype, served.max_lora_rank, served.cuda)
        self._receive_weights()
        self._server = OwnServer(config, here, self._root / "vllm.log", host=self._address)
        self._server.start()
        return ServerAddress(self._server.address, self._receives_at)

    def tend(self) -> str:
        """Start again what has ended; the driver asks this regularly. Returns what happened, empty if nothing did."""
        assert self._server is not None
        if self._receiver is not None and self._receiver.poll() is not None:
            self._receive_weights()
        if self._restart is not None and self._restart.is_alive():
            return ""
        fault, self._fault = self._fault, ""
        if fault or self._server.runs:
            return fault
        # In a thread: a start takes a minute, and the driver must not take this actor for dead meanwhile.
        self._restart = Thread(target=self._start_again, args=(self._server,), daemon=True)
        self._restart.start()
        return f"the rollout server at {self._server.address} ended and is started again"

    def _start_again(self, server: OwnServer) -> None:
        try:
            server.restart()
        except RolloutError as error:
            self._fault = f"the rollout server at {server.address} cannot be started again: {error.message}"

    def _receive_weights(self) -> None:
        host, _, port = self._receives_at.removeprefix("http://").rpartition(":")
        module = "grpo_tasks.operating.weights_server"
        self._receiver = subprocess.Popen(
            [sys.executable, "-P", "-m", module, str(self._root / "weights"), host, port],
            stdin=subprocess.DEVNULL,
            env=os.environ | {PARENT: str(os.getpid())},
        )
