"""Every input of a run edited at every boundary of a step: what is recorded is what ran, or the run stops and names the file.

When the key of a step is known and its body has not begun, the process edits inputs and leaves them so. What a run goes on with
is edited anew before each of its steps, so whatever read it later than the start would read something else. The reference is an
undisturbed run: keys, adapters, samples, metrics, uploaded sources and versions have to be equal.
"""

import os
import shutil
import sys
from collections.abc import Callable
from dataclasses import dataclass
from itertools import count
from pathlib import Path

import pytest
import yaml

from schemas.paths import resolve
from tests.flows.contents import contents, differences
from tests.flows.place import SMALL, Place

pytestmark = [pytest.mark.long, pytest.mark.xdist_group("edited"), pytest.mark.timeout(3600)]

STEP, EDIT = "TEST_STEP", "TEST_EDIT"
"""Environment variables of the run: the step before which an input is edited, EVERY for all of them, and which one."""
EVERY = "every step"
MINE = """
from my_helper import SCALE

def mine(prompts, completions, **columns):
    return [SCALE * len(texts[-1]["content"]) / 100 for texts in completions]

"""
ROOM = """
from my_words import WORD

class Room:
    def reset(self, row, seed):
        return [{"role": "user", "content": "Your number?"}]

    def step(self, completion):
        return {"messages": [], "done": True, "reward": WORD * len(completion)}
"""
SHOWN = 'def shown(row):\n    return [{"role": "assistant", "content": "1 and 2"}]\n'
SOURCES = {
    "my_rewards.py": MINE,
    "my_helper.py": "SCALE = 1.0\n",
    "my_evaluator.py": "def counted(completions, **columns):\n    return [float(len(text)) for text in completions]\n",
    "my_room.py": ROOM,
    "my_words.py": "WORD = 0.01\n",
    "my_demonstrations.py": SHOWN,
}
EDITED = {
    "my_rewards.py": MINE.replace("/ 100", "/ 10"),
    "my_helper.py": "SCALE = -3.0\n",
    "my_evaluator.py": "def counted(completions, **columns):\n    return [9.0 for text in completions]\n",
    "my_room.py": ROOM.replace("Your number?", "Any number of yours, and why?"),
    "my_words.py": "WORD = 5.0\n",
    "my_demonstrations.py": SHOWN.replace("1 and 2", "3 or 4"),
}
CONFIG = SMALL | {
    "model": {"path": "base"},
    "data": {"train": [{"path": "train.jsonl"}], "eval": [{"path": "eval.jsonl"}]},
    "completion": {"format": "none"},
    "validation": {"max_prompt_length": 400},
    "rollout": {"max_completion_length": 16},
    "interaction": {"environment": "my_room:Room", "workers": 1, "max_turns": 2, "max_tokens": 200},
    "rewards": {"functions": {"mine": {"function": "my_rewards:mine"}}},
    "stages": [
        {
            "name": "shown", "kind": "sft", "demonstrations": {"function": "my_demonstrations:shown"}, "max_steps": 2,
            "per_device_train_batch_size": 8,
        },
        SMALL["stages"][0] | {"name": "played", "rewards": ["mine", "environment"]},
    ],
    "evaluation": SMALL["evaluation"] | {"evaluators": {"counted": "my_evaluator:counted"}},
    "promotion": {"metric": "reward"},
}  # fmt: skip


def edit_modules(turn: int) -> None:
    for name, text in EDITED.items():
        Path(name).write_text(f"{text}# {turn}\n", encoding="utf-8")


def edit_config(turn: int) -> None:
    Path("small.yaml").write_text(yaml.safe_dump(CONFIG | {"seed": 99 + turn}), encoding="utf-8")


def edit_data(_: int) -> None:
    rows = Path("train.jsonl").read_text(encoding="utf-8").splitlines(keepends=True)
    Path("train.jsonl").write_text("".join(rows[::-1][:100]), encoding="utf-8")


def edit_template(_: int) -> None:
    template = Path("base/chat_template.jinja")
    template.write_text("Hello. " + template.read_text(encoding="utf-8"), encoding="utf-8")


def edit_weights(_: int) -> None:
    with Path("base/model.safetensors").open("r+b") as file:
        file.seek(-64, os.SEEK_END)
        file.write(bytes(64))


@dataclass(frozen=True)
class Edit:
    make: Callable[[int], None]
    """Receives how often something was edited before."""
    files: tuple[str, ...] = ()
    """What the run has to name when it goes on."""
    stops: str = ""
    """What the run says when it stops; empty: it goes on with what it had."""


STOPS = "the base model has changed since this run started"
EDITS = {
    "modules": Edit(edit_modules, tuple(EDITED)),
    "config": Edit(edit_config),
    "data": Edit(edit_data, ("train.jsonl",)),
    "template": Edit(edit_template, stops=STOPS),
    "weights": Edit(edit_weights, stops=STOPS),
}
AT_ONCE = ("modules", "config", "data")
"""Edits with which a run goes on. They are made in one run: what differs shows which of them was read."""
UNREAD = "prepare_data/all"
"""The step that reads the data. Contents that changed before are refused, because the run has the key of the others."""
READ = "the file has changed since this run started"


def prepared(place: Place) -> None:
    """Write the inputs of the run into the folder of a user."""
    for name, text in SOURCES.items():
        place.write(name, text)
    place.write("small.yaml", yaml.safe_dump(CONFIG))
    shutil.copytree(resolve("embedded:base"), place.root / "base")
    for name, file, rows in (("train", "arithmetic_train", 200), ("eval", "arithmetic_eval", 40)):
        lines = Path(resolve(f"embedded:{file}.jsonl")).read_text(encoding="utf-8").splitlines(keepends=True)
        place.write(f"{name}.jsonl", "".join(lines[:rows]))


def steps_of(place: Place) -> list[str]:
    """The folders of the steps of a finished run, in the order in which they ended."""
    results = sorted(place.root.glob("runs/small/*/*/result.json"), key=lambda path: path.stat().st_mtime_ns)
    return [f"{path.parent.parent.name}/{path.parent.name}" for path in results]


def recorded(place: Place) -> dict:
    """What must not depend on an edit: keys of the steps, results, and every source that was uploaded."""
    parent = place.parent("small")
    uploaded = {}
    for kind in ("rewards", "evaluators", "demonstrations", "interaction"):
        for artifact in place.client.list_artifacts(parent.info.run_id, kind):
            path = place.client.download_artifacts(parent.info.run_id, artifact.path, str(place.root))
            uploaded[artifact.path] = Path(path).read_text(encoding="utf-8")
    [version] = place.client.search_model_versions("name='small'")
    tags = {name: value for name, value in version.tags.items() if "sha256" in name}
    config = place.client.download_artifacts(parent.info.run_id, "config.yaml", str(place.root))
    folders = {"steps": sorted(steps_of(place)), "config": Path(config).read_text(encoding="utf-8")}
    return contents(place) | {"uploaded": uploaded, "tags": tags} | folders


def disturbed(place: Place, edits: tuple[str, ...], step: str, first: Place, wanted: dict) -> list[str]:
    """Run the pipeline with edits before a step, in an empty folder that gets what the steps before have made; what is wrong."""
    prepared(place)
    if step != EVERY:
        shutil.copytree(first.root / "runs", place.root / "runs")
        order = steps_of(first)
        for later in order[order.index(step) :]:
            shutil.rmtree(place.root / "runs" / "small" / later)
    stops = next((EDITS[edit].stops for edit in edits), "") or (READ if edits == ("data",) else "")
    process = place.start_python("tests.flows.test_edited_inputs", **{STEP: _label(step), EDIT: ",".join(edits)})
    output, _ = process.communicate(timeout=900)
    said = " ".join(output.replace("│", " ").split())
    if stops:
        faults = [] if process.returncode and stops in said else [f"exit code {process.returncode}: {said[-500:]}"]
        # What was made of an edited input may not be found under the key of the other.
        return faults + ([f"{step} has a result"] if (place.root / "runs" / "small" / step / "result.json").exists() else [])
    if process.returncode:
        return [f"exit code {process.returncode}: {output[-1500:]}"]
    named = [name for edit in edits for name in EDITS[edit].files]
    unsaid = [f"did not name {name}" for name in named if f"{name} has changed since this run started" not in said]
    return differences(recorded(place), wanted, _label(step)) + unsaid


def cases_of(steps: list[str]) -> list[tuple[tuple[str, ...], str]]:
    """Which edits are made before which steps, in runs of their own."""
    [reading] = [step for step in steps if _label(step) == UNREAD]
    [resumed] = [step for step in steps if _label(step) == "train_stage/played"]
    # A step that reads no model need not notice that it has changed. Weights and template count as one, so they take turns.
    with_model = [step for step in steps if not step.startswith(("prepare_data", "publish_model", "write_report"))]
    turns = [((("template", "weights")[number % 2],), step) for number, step in enumerate(with_model)]
    return [(AT_ONCE, EVERY), (AT_ONCE, resumed), (("data",), reading), *turns]


def _label(step: str) -> str:
    """The step and its part, without the key."""
    return step if step == EVERY else step.rpartition("-")[0]


def run_with_an_edit() -> None:
    """`grpo run small.yaml` in this process, with the edit that the environment names."""
    from flows.cli.main import app
    from grpo_tasks.running import step as steps

    ours, wanted, turns = steps.Step._skip_or_run, os.environ[STEP], count()

    def edited(self, work, inputs):
        # Its key is known, its work has not begun.
        label = _label(f"{work.directory.parent.name}/{work.directory.name}")
        if wanted in (label, EVERY):
            for edit in os.environ[EDIT].split(","):
                if (edit, wanted, label) != ("data", EVERY, UNREAD):
                    EDITS[edit].make(next(turns))
        return ours(self, work, inputs)

    steps.Step._skip_or_run = edited
    sys.argv = ["grpo", "run", "small.yaml"]
    app()


def test_editing_any_input_changes_nothing_recorded_or_stops_the_run(tmp_path, prefect_api):
    def place(name):
        (tmp_path / name).mkdir()
        return Place(tmp_path / name, prefect_api)

    first = place("undisturbed")
    prepared(first)
    first.grpo("run", "small.yaml")
    wanted, cases = recorded(first), cases_of(steps_of(first))
    assert len(cases) > 10
    faults = {
        (edits, step): disturbed(place(str(number)), edits, step, first, wanted) for number, (edits, step) in enumerate(cases)
    }
    assert {case: found for case, found in faults.items() if found} == {}


if __name__ == "__main__":
    run_with_an_edit()
