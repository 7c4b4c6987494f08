"""Two retrainings of one model at once: the second waits, names the run it waits for, and then finds nothing to do. New data is
sent to the server before it counts as reported.
"""

import subprocess
import sys
import time

import pytest
import yaml

from flows.retrain import variable_of
from tests.flows.place import SMALL, Place, ask

pytestmark = pytest.mark.timeout(1800)

RETRAIN = "from flows.cli.main import app; app(['retrain', 'small.yaml'])"
HOLDER = """
import sys
from prefect import flow
from grpo_tasks.running.slots import hold

@flow(flow_run_name="the-first-one")
def first():
    with hold("retrain-small"):
        print("HELD", flush=True)
        sys.stdin.read()

first()
"""


KILLED_AFTER_THE_CHECK = """
import os
from pathlib import Path
from prefect.variables import Variable
from flows.retrain import watch_data_flow

assert watch_data_flow("small.yaml") is False
Path("rows.jsonl").write_text("new")
remember = Variable.set

def killed(*given, **named):
    remember(*given, **named)
    os._exit(9)

Variable.set = killed
watch_data_flow("small.yaml")
"""


def start(place, code):
    """A flow that a script starts."""
    return subprocess.Popen(
        [sys.executable, "-u", "-c", code],
        cwd=place.root,
        env=place.environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def read_until(process, words):
    lines = []
    for line in process.stdout:
        lines.append(line)
        if words in line:
            return line
    raise AssertionError(f"it ended without {words!r}:\n{''.join(lines[-30:])}")


def messages(place, state):
    """Messages of the runs in a state of this name."""
    found = ask(f"{place.api}/flow_runs/filter", {"flow_runs": {"state": {"name": {"any_": [state]}}}})
    return [run["state"]["message"] for run in found]


@pytest.mark.long
@pytest.mark.ci
def test_a_second_retraining_waits_and_names_the_first(place, small):
    small()
    first = start(place, HOLDER)
    second = None
    try:
        read_until(first, "HELD")
        second = start(place, RETRAIN)
        assert "held by the run the-first-one" in read_until(second, "waiting for the slot retrain-small")
        assert second.poll() is None
        assert not list(place.root.glob("runs/small/*/*"))
        # In a list of runs, too: not "Running", which says nothing.
        while "waiting for the retraining of small, held by the-first-one" not in messages(place, "Waiting"):
            assert second.poll() is None
            time.sleep(0.2)
    finally:
        for process in (first, second):
            if process:
                process.kill()
                process.communicate()


@pytest.mark.long
@pytest.mark.parametrize("attempt", range(2))
def test_of_two_retrainings_at_once_one_trains(tmp_path, request, attempt):
    with_server = attempt % 2 == 0
    api = request.getfixturevalue("prefect_api") if with_server else None
    place = Place(tmp_path, api)
    place.write("small.yaml", yaml.safe_dump(SMALL))
    both = [start(place, RETRAIN) for _ in range(2)]
    outputs = [process.communicate(timeout=900)[0] for process in both]
    assert [process.returncode for process in both] == [0, 0], "\n".join(output[-3000:] for output in outputs)
    assert sum("\nnothing to do: version 1 of small" in output for output in outputs) == 1
    assert sum("\nsmall version 1" in output for output in outputs) == 1
    assert "waiting for the slot retrain-small, held by the run" in "".join(outputs)
    if with_server:
        # Other tests have runs on this server, also some that end without a message.
        ended = [message for message in messages(place, "Completed") if message and ("small" in message or "v1" in message)]
        assert "nothing to do: version 1 of small was made of the same data, code and config" in ended
        assert any(message.startswith(("promoted v1: accuracy", "v1 not promoted: accuracy")) for message in ended), ended
    assert [int(version.version) for version in place.client.search_model_versions("name='small'")] == [1]


@pytest.mark.long
def test_the_event_of_new_data_precedes_its_mark(place, small):
    small(data=SMALL["data"] | {"train": [{"path": "rows.jsonl"}]})
    place.write("rows.jsonl", "old")
    process = start(place, KILLED_AFTER_THE_CHECK)
    output, _ = process.communicate(timeout=300)
    assert process.returncode == 9, output[-3000:]
    wanted = {"filter": {"event": {"name": ["grpo.data.changed"]}, "resource": {"id": ["grpo.data.small"]}}}
    deadline = time.monotonic() + 60
    while not (found := ask(f"{place.api}/events/filter", wanted)["events"]):
        assert time.monotonic() < deadline, "nobody would ever retrain with these rows"
        time.sleep(0.5)
    assert found[0]["payload"]["source"] == "small.yaml"


def test_names_that_differ_in_one_character_do_not_share_a_variable():
    names = ["a-b", "a_b", "a.b", "A_b", "\u00e4_b"]
    assert len({variable_of(name) for name in names}) == len(names)
    assert variable_of("a_b") == "grpo_data_a_b"
