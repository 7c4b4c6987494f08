"""kill -9 at random points of everything this project runs, start it again, compare with a run that nobody touched.

    python -m tests.flows.chaos --kills 200 --seed 1      (make chaos, with --engine vllm besides)

    pipeline 1, 4, ...   an empty folder without any server: `grpo run`, then `grpo merge`, then `grpo rollback`
    pipeline 2, 5, ...   the same with a Prefect server and an MLflow server, which is killed too
    pipeline 3, 6, ...   the same under `grpo up`, whose servers and worker are killed and started again by `grpo up`

A victim is chosen by its kind first, the kind that was hit least; so the short-lived ones (upload, publish, rollback) get their
turn. The report counts the kills of each kind.
"""

import argparse
import fcntl
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import psutil
import yaml
from mlflow import MlflowClient

from tests.flows.contents import contents, differences
from tests.flows.place import SMALL, Place, end_group, prefect_server, started_mlflow
from tests.ports import free_ports

STAGE = SMALL["stages"][0]
CONFIG = SMALL | {
    "stages": [STAGE | {"max_steps": 12, "beta": 0.01}, STAGE | {"name": "correctness", "rewards": ["format", "correctness"]}]
}
GRACE_S = 15.0
VLLM_PYTHON = Path(__file__).parents[2] / ".venv-vllm/bin/python"
MODULES = {
    "grpo_tasks.grpo": "trainer",
    "grpo_tasks.rollout": "sampler",
    "grpo_tasks.policy": "merge",
    "grpo_tasks.rewards.serve": "reward worker",
    "grpo_tasks.processes.fork_server": "fork server",
    "grpo_tasks.tracking.log_model": "upload",
    "uvicorn": "temporary Prefect server",
}
KINDS = ("flow", "publish", "trainer", "sampler", "merge", "reward worker", "fork server", "upload")
"""What a pipeline consists of; a server is a kind of its own."""
SHARES = {"run": 6, "merge": 1, "rollback": 1}
"""Kills of one command before it is left in peace, so that all three ways of working get their turn."""

SECOND_VERSION = """
from mlflow import MlflowClient
client = MlflowClient()
first = client.get_model_version("small", "1")
model = first.source.rpartition("/")[2]
client.create_model_version("small", f"models:/{model}", run_id=first.run_id, model_id=model)
client.set_registered_model_alias("small", "champion", "2")
client.set_registered_model_alias("small", "previous", "1")
"""
"""The same model again, as the champion: something to roll back."""

Kill = Callable[[], None]


@dataclass
class Outcome:
    """What was done and seen."""

    kills: int = 0
    victims: Counter = field(default_factory=Counter)
    pipelines: int = 0
    left_over: list[str] = field(default_factory=list)
    differences: list[str] = field(default_factory=list)

    def __add__(self, other: "Outcome") -> "Outcome":
        return Outcome(
            self.kills + other.kills,
            self.victims + other.victims,
            self.pipelines + other.pipelines,
            self.left_over + other.left_over,
            self.differences + other.differences,
        )


class Shop(Place):
    """A working directory without any server: each command starts its own and keeps everything in files."""

    def __init__(self, root: Path, api: str | None, config: dict) -> None:
        super().__init__(root, api)
        root.mkdir()
        self.write("small.yaml", yaml.safe_dump(config))

    def servers(self) -> dict[str, Kill]:
        """What can be killed besides the command and its children; killing one starts it again."""
        return {}

    def close(self) -> None:
        """End what was started here."""


class ServedShop(Shop):
    """With a Prefect server that others use too, and an MLflow server of its own."""

    def __init__(self, root: Path, api: str, config: dict) -> None:
        super().__init__(root, api, config)
        [self.port] = free_ports(1)
        self.server = started_mlflow(root, self.port)

    @property
    def environment(self) -> dict[str, str]:
        return super().environment | {"MLFLOW_TRACKING_URI": f"http://127.0.0.1:{self.port}"}

    @property
    def client(self) -> MlflowClient:
        return MlflowClient(f"http://127.0.0.1:{self.port}")

    def servers(self) -> dict[str, Kill]:
        return {"MLflow server": self._kill}

    def _kill(self) -> None:
        end_group(self.server, signal.SIGKILL)
        self.server = started_mlflow(self.root, self.port)

    def close(self) -> None:
        end_group(self.server)


class UpShop(Shop):
    """Under `grpo up`."""

    def __init__(self, root: Path, api: str, config: dict) -> None:  # noqa: ARG002 - its siblings' arguments
        super().__init__(root, None, config)
        self.addresses: dict[str, str] = {}
        ports = [str(port) for port in free_ports(2)]
        self.grpo("up", "--prefect-port", ports[0], "--mlflow-port", ports[1])
        self.addresses = json.loads((root / ".grpo" / "addresses.json").read_text())

    @property
    def environment(self) -> dict[str, str]:
        found = self.addresses
        at = {"PREFECT_API_URL": f"{found['prefect']}/api", "MLFLOW_TRACKING_URI": found["mlflow"]} if found else {}
        return super().environment | at

    @property
    def client(self) -> MlflowClient:
        return MlflowClient(self.addresses["mlflow"])

    def servers(self) -> dict[str, Kill]:
        parts = json.loads((self.root / ".grpo" / "stack.json").read_text())
        return {f"grpo up: {part['name']}": partial(self._kill, part["pid"]) for part in parts}

    def _kill(self, pid: int) -> None:
        with suppress(ProcessLookupError):
            os.killpg(pid, signal.SIGKILL)
        # The address of the server that runs is none of this command's business.
        self.addresses, known = {}, self.addresses
        process = self.start("up")
        output, _ = process.communicate(timeout=900)
        # The stack's own supervisor may have been faster.
        assert process.returncode == 0 or "a stack runs here already" in output, output[-6000:]
        self.addresses = known

    def close(self) -> None:
        self.addresses = {}
        self.grpo("down")


SHOPS = (Shop, ServedShop, UpShop)


def undisturbed(root: Path, api: str, config: dict = CONFIG) -> tuple[dict, float]:
    """The contents of a run that nobody touches, and how long it took in seconds."""
    shop = ServedShop(root / "whole", api, config)
    try:
        began = time.monotonic()
        shop.grpo("run", "small.yaml")
        return contents(shop), time.monotonic() - began
    finally:
        shop.close()


def rampage(root: Path, api: str, *, kills: int, seed: int, wanted: dict, seconds: float, config: dict = CONFIG) -> Outcome:
    """Kill and start again until so many kills are done and the last pipeline is at its end."""
    draw, outcome = random.Random(seed), Outcome()
    while outcome.kills < kills:
        kind = SHOPS[outcome.pipelines % len(SHOPS)]
        shop = kind(root / f"chaos-{outcome.pipelines}", None if kind is Shop else api, config)
        hunt = Hunt(shop, draw, kills, seconds, outcome)
        try:
            found = _a_day(shop, hunt, wanted, f"pipeline {outcome.pipelines} ({kind.__name__})")
        finally:
            shop.close()
        outcome.differences += found
        outcome.pipelines += 1
        shown = "; ".join(found) or "no difference"
        print(f"pipeline {outcome.pipelines} at its end after {outcome.kills} kills in all: {shown}", flush=True)
    return outcome


def _a_day(shop: Shop, hunt: "Hunt", wanted: dict, where: str) -> list[str]:
    """Train and publish, merge by hand, roll back: what is not as it should be."""
    hunt.until_done("run", "small.yaml")
    found = differences(contents(shop), wanted, where)
    [adapter] = shop.root.glob("runs/small/train_stage/correctness-*/final")
    hunt.until_done("merge", adapter, "small.yaml", "--into", "merged")
    files = sorted(path.name for path in (shop.root / "merged").iterdir())
    [whole] = shop.root.glob("runs/small/merge_adapter/*/model")
    if any((whole / name).read_bytes() != (shop.root / "merged" / name).read_bytes() for name in files) or not files:
        found.append(f"{where}: the merged copy is not the merged model")
    # In a process of its own: mlflow looks such a source up in its global store.
    store = {"MLFLOW_TRACKING_URI": f"sqlite:///{shop.root / 'mlflow.db'}"} | shop.environment
    subprocess.run([sys.executable, "-c", SECOND_VERSION], cwd=shop.root, env=store, check=True, capture_output=True)
    hunt.until_done("rollback", "small", "--to", "1", fine="is the champion already")
    aliases = dict(shop.client.get_registered_model("small").aliases)
    return found + ([] if str(aliases["champion"]) == "1" else [f"{where}: aliases {aliases} after the rollback"])


@dataclass
class Hunt:
    """Kills in one working directory."""

    shop: Shop
    draw: random.Random
    kills: int
    seconds: float
    outcome: Outcome
    orphans: list[psutil.Process] = field(default_factory=list)

    def until_done(self, *command: object, fine: str = "") -> None:
        """The same command again and again, until it comes to its end, or says what is as good as that."""
        name, first = str(command[0]), self.outcome.kills
        while True:
            process, before = self.shop.start(*command), self.outcome.kills
            while self._may_kill(name, first) and self._kills_once(process, name, first):
                pass
            output, _ = process.communicate(timeout=900)
            self._end_orphans()
            if process.returncode == 0 or (fine and fine in output):
                return
            # What fails although nobody touched it would fail for ever.
            assert self.outcome.kills > before, f"failed by itself:\n{output[-3000:]}"

    def _may_kill(self, name: str, first: int) -> bool:
        return self.outcome.kills < self.kills and self.outcome.kills - first < SHARES[name]

    def _kills_once(self, process: subprocess.Popen, name: str, first: int) -> bool:
        """Kill one thing while the command is at work; False when it came to its end before."""
        # A little more time after every kill: a step that takes longer than the time between two would never be done.
        pause = self.draw.uniform(0.03, 0.15) * self.seconds * 1.1 ** (self.outcome.kills - first)
        with suppress(subprocess.TimeoutExpired):
            process.wait(pause if name == "run" else self.draw.uniform(1.0, 6.0))
        count = self.outcome.victims
        possible = [*KINDS, *self.shop.servers()] if name == "run" else [f"grpo {name}"]
        wanted = min(possible, key=lambda kind: (count[kind], self.draw.random()))
        patience = time.monotonic() + self.seconds / 2
        while process.poll() is None:
            present = self._present(process, name)
            if wanted in present or time.monotonic() > patience:
                kind = wanted if wanted in present else min(present, key=lambda kind: count[kind])
                time.sleep(self.draw.uniform(0.0, 0.2))
                self._kill(process, kind, present[kind])
                return True
            time.sleep(0.03)
        return False

    def _present(self, process: subprocess.Popen, name: str) -> dict[str, Kill]:
        """How each kind that is alive now can be killed."""
        found: dict[str, Kill] = dict(self.shop.servers()) if name == "run" else {}
        with suppress(psutil.NoSuchProcess):
            flow = psutil.Process(process.pid)
            for child in flow.children(recursive=True):
                with suppress(psutil.NoSuchProcess):
                    found[_kind(child)] = child.kill
            publishing = any(_is_held(lock) for lock in self.shop.root.glob("runs/small/.locks/publish_model-*"))
            found[f"grpo {name}" if name != "run" else "publish" if publishing else "flow"] = flow.kill
        return found

    def _kill(self, process: subprocess.Popen, kind: str, kill: Kill) -> None:
        family: list[psutil.Process] = []
        with suppress(psutil.NoSuchProcess):
            family = psutil.Process(process.pid).children(recursive=True)
            kill()
        self.outcome.kills += 1
        self.outcome.victims[kind] += 1
        if kind in ("flow", "publish") or kind.startswith("grpo "):
            with suppress(subprocess.TimeoutExpired):
                process.wait(0.2 if kind.startswith("grpo up") else 60)
        if process.returncode == -signal.SIGKILL:
            # Prefect's own temporary server does not notice that nobody is left to serve.
            ours = [one for one in family if _kind(one) not in ("temporary Prefect server", "gone")]
            self.orphans = [one for one in family if one not in ours]
            _, alive = psutil.wait_procs(ours, timeout=GRACE_S)
            self.outcome.left_over += [f"{_kind(one)} after {kind} was killed" for one in alive]

    def _end_orphans(self) -> None:
        for one in self.orphans:
            with suppress(psutil.NoSuchProcess):
                one.kill()
        self.orphans = []


def _is_held(lock: Path) -> bool:
    """Whether a step is at work in its folder."""
    with lock.open() as file:
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False


def _kind(process: psutil.Process) -> str:
    try:
        words = process.cmdline()
    except psutil.Error:
        return "gone"
    named = next((word for word in words if word in MODULES or word.startswith(("grpo_tasks.", "vllm.", "VLLM::"))), None)
    return MODULES.get(named, named) if named else " ".join(words[:3]) or "gone"


def main() -> None:
    """Run, and print one line a figure."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--lanes", type=int, default=2, help="pipelines at once, each with its share of the kills")
    parser.add_argument("--engine", choices=["local", "vllm"], default="local")
    given = parser.parse_args()
    config = CONFIG | {"rollout": CONFIG["rollout"] | {"engine": given.engine, "vllm": {"python": str(VLLM_PYTHON)}}}
    with tempfile.TemporaryDirectory() as folder, prefect_server(Path(folder)) as api, ThreadPoolExecutor() as pool:
        wanted, seconds = undisturbed(Path(folder), api, config)

        def lane(number: int) -> Outcome:
            (root := Path(folder) / f"lane-{number}").mkdir()
            kills, seed = given.kills // given.lanes, given.seed + number
            return rampage(root, api, kills=kills, seed=seed, wanted=wanted, seconds=seconds, config=config)

        outcome = sum(pool.map(lane, range(given.lanes)), Outcome())
    print(
        f"{given.engine} engine: {outcome.kills} kills over {outcome.pipelines} pipelines of {seconds:.0f} s, seed {given.seed}"
    )
    print("victims: " + ", ".join(f"{kind} {count}" for kind, count in outcome.victims.most_common()))
    print("processes left over: " + ("none" if not outcome.left_over else "; ".join(outcome.left_over)))
    print("differences: " + ("none" if not outcome.differences else "\n".join(outcome.differences)))
    raise SystemExit(bool(outcome.left_over or outcome.differences))


if __name__ == "__main__":
    main()
