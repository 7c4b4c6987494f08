"""However a run ends, nothing of it is left: no process, no temporary folder, no slot, and no state that says it runs."""

import json
import signal
import subprocess
import time
from contextlib import suppress

import psutil
import pytest
import yaml

from tests.flows.place import BIN, SMALL, Place, ask, wait_for_step

pytestmark = [pytest.mark.xdist_group("away"), pytest.mark.long, pytest.mark.timeout(1800)]

SLOT = "card-of-the-ends"
LONG = SMALL | {
    "stages": [SMALL["stages"][0] | {"max_steps": 100_000, "save_steps": 5}],
    "resources": SMALL["resources"] | {"gpu_slot": SLOT},
}
GONE_S = 60.0
"""What stays longer than this stays; on an idle machine all are gone in a second or two."""


@pytest.fixture(scope="module")
def place(tmp_path_factory, prefect_api):
    """One folder: each run goes on from where the one before was ended."""
    place = Place(tmp_path_factory.mktemp("ends"), prefect_api)
    place.write("small.yaml", yaml.safe_dump(LONG))
    (place.root / "tmp").mkdir()
    return place


@pytest.fixture
def start(place):
    """Start runs; what a failed test leaves is killed."""
    started = []

    def begin(*overrides):
        started.append(Running(place, *overrides))
        return started[-1]

    yield begin
    for running in started:
        running.process.kill()


class Running:
    """A run in the middle of its stage, with its processes and its flow run."""

    def __init__(self, place, *overrides):
        self.place = place
        done = sum(len(path.read_text().splitlines()) for path in self.journals())
        # bitsandbytes makes torch's cache where it is imported; that folder is no leftover of ours.
        folders = {"TMPDIR": str(place.root / "tmp"), "TORCHINDUCTOR_CACHE_DIR": str(place.root / "inductor")}
        self.process = place.start("run", "small.yaml", *overrides, **folders)
        self.stage_dir = wait_for_step("runs/small/train_stage/*/metrics.jsonl", place.root, done + 8, self.process)
        self.family = psutil.Process(self.process.pid).children(recursive=True)
        notes = {path.stem: json.loads(path.read_text()) for path in place.root.glob("runs/small/.running/*.json")}
        [self.flow_run] = [name for name, note in notes.items() if note["pid"] == self.process.pid]
        assert self.state() == "RUNNING"

    def journals(self):
        return self.place.root.glob("runs/small/train_stage/*/metrics.jsonl")

    def trainer(self, limit_s=600):
        """The process that trains; one that died is tried again after a few seconds."""
        deadline = time.monotonic() + limit_s
        while time.monotonic() < deadline:
            family = psutil.Process(self.process.pid).children(recursive=True)
            with suppress(psutil.NoSuchProcess):
                found = [one for one in family if "grpo_tasks.grpo" in one.cmdline()]
                if found:
                    self.family += found
                    return found[0]
            time.sleep(0.1)
        raise AssertionError(f"no trainer within {limit_s} s")

    def end(self):
        """Exit code and output; then nothing may be left."""
        output, _ = self.process.communicate(timeout=600)
        _, alive = psutil.wait_procs(self.family, timeout=GONE_S)
        assert not alive, [one.cmdline() for one in alive]
        assert not list((self.place.root / "tmp").iterdir())
        assert not self.place.client.search_model_versions("name='small'")
        return self.process.returncode, output

    def state(self):
        return ask(f"{self.place.api}/flow_runs/{self.flow_run}")["state_type"]

    def slots(self):
        return ask(f"{self.place.api}/v2/concurrency_limits/{SLOT}")["active_slots"]

    def tracked(self):
        return self.place.parent("small").info.status


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal(start, number):
    running = start()
    assert running.slots() == 1
    running.process.send_signal(number)
    code, output = running.end()
    assert code in (130, -number)
    assert "Traceback" not in output
    assert "Crash" not in output, "the command has said that it stops"
    assert (running.state(), running.tracked(), running.slots()) == ("CRASHED", "KILLED", 0)


def test_cancel(place, start):
    running = start()
    subprocess.run([BIN / "prefect", "flow-run", "cancel", running.flow_run], env=place.environment, check=True)
    code, output = running.end()
    assert code == 130
    assert "Traceback" not in output
    assert (running.state(), running.tracked(), running.slots()) == ("CANCELLED", "KILLED", 0)


def test_out_of_memory(start):
    running = start()
    for _ in range(2):
        # What the kernel does to the process that takes too much; the first time the step is tried again.
        trainer = running.trainer()
        trainer.kill()
        trainer.wait(timeout=600)
    code, output = running.end()
    assert code == 1
    assert "signal 9 is often the kernel out of memory" in output
    assert (running.state(), running.tracked(), running.slots()) == ("FAILED", "FAILED", 0)


def test_a_deadline(start):
    running = start("--set", "resources.max_hours=0.005")
    code, output = running.end()
    assert code == 1
    assert "after resources.max_hours" in output
    last = max(running.stage_dir.glob("checkpoints/step-*"))
    assert f"stopped at update {int(last.name.removeprefix('step-'))} of" in output
    assert (running.state(), running.tracked(), running.slots()) == ("FAILED", "FAILED", 0)


def test_a_kill_is_reported_by_the_next_run(start):
    killed = start()
    killed.process.kill()
    killed.end()
    again = start()
    assert killed.state() == "CRASHED"
    again.process.send_signal(signal.SIGTERM)
    again.end()
