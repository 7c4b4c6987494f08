"""Every input of a run edited at every boundary of a step: what is recorded has to be what ran.

    python -m tests.flows.edited_inputs          prints the table: input, moment of the edit, what the run recorded

The run is `grpo run`. When the key of a step is known and its body has not begun, this edits inputs and leaves them so. The
reference is a run that nobody disturbed: keys, adapters, samples, metrics, uploaded sources and versions have to be equal, or the
run has to stop and say which file changed.

Nobody can change the environment variables of a process from outside. A run that a worker continues after an approval may find
others: it compares its store (tests/tracking/test_approval.py). The alias of the champion is moved in
tests/tracking/test_publishing.py.
"""

import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import yaml

from schemas.paths import resolve
from tests.flows.contents import contents, differences
from tests.flows.place import SMALL, Place, prefect_server

STEP, EDIT = "TEST_STEP", "TEST_EDIT"
"""Environment variables of the run: the step before which an input is edited, and which one."""
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


def edit_modules() -> None:
    for name, text in EDITED.items():
        Path(name).write_text(text, encoding="utf-8")


def edit_config() -> None:
    Path("small.yaml").write_text(yaml.safe_dump(CONFIG | {"seed": 99}), encoding="utf-8")


def edit_data() -> None:
    rows = Path("train.jsonl").read_text(encoding="utf-8").splitlines(keepends=True)
    Path("train.jsonl").write_text("".join(rows[::-1][:100]), encoding="utf-8")


def edit_template() -> None:
    template = Path("base/chat_template.jinja")
    template.write_text("Hello. " + template.read_text(encoding="utf-8"), encoding="utf-8")


def edit_weights() -> None:
    with Path("base/model.safetensors").open("r+b") as file:
        file.seek(-64, os.SEEK_END)
        file.write(bytes(64))


@dataclass(frozen=True)
class Edit:
    """An edit of an input."""

    inputs: str
    make: Callable[[], None]
    files: tuple[str, ...] = ()
    """What the run has to name when it goes on."""
    stops: str = ""
    """What the run says when it stops; empty: it goes on with what it had."""


STOPS = "the base model has changed since this run started"
EDITS = {
    "modules": Edit("reward module, evaluator, environment, their imports, demonstrations", edit_modules, tuple(EDITED)),
    "config": Edit("config file", edit_config),
    "data": Edit("data file", edit_data, ("train.jsonl",)),
    "template": Edit("chat template", edit_template, stops=STOPS),
    "weights": Edit("base weights", edit_weights, stops=STOPS),
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


SAME = "as in the undisturbed run; every change is named"


@dataclass(frozen=True)
class Outcome:
    """What a run did about an edit."""

    inputs: str
    """What was edited."""
    step: str
    """Before which step."""
    good: str
    """What to say when nothing was wrong."""
    faults: list[str]
    """What was wrong: differences from the undisturbed run, a change that was not said, a run that did not stop."""


def undisturbed(place: Place) -> dict:
    """Run the pipeline, and return what it recorded."""
    prepared(place)
    place.grpo("run", "small.yaml")
    return recorded(place)


def disturbed(place: Place, edits: tuple[str, ...], step: str, first: Place, wanted: dict) -> Outcome:
    """Run the pipeline with edits before a step, and compare.

    Args:
        place: an empty folder. It gets the inputs, and what the steps before have made in the undisturbed run.
        edits: names of edits.
        step: the folder of a step, as `steps_of` names it.
        first: where the undisturbed run was.
        wanted: what it recorded.
    """
    prepared(place)
    shutil.copytree(first.root / "runs", place.root / "runs")
    order = steps_of(first)
    for later in order[order.index(step) :]:
        shutil.rmtree(place.root / "runs" / "small" / later)
    stops = next((EDITS[edit].stops for edit in edits), "") or (READ if edits == ("data",) else "")
    process = place.start_python("tests.flows.edited_inputs", **{STEP: _label(step), EDIT: ",".join(edits)})
    output, _ = process.communicate(timeout=900)
    said = " ".join(output.replace("│", " ").split())
    outcome = Outcome(
        ", ".join(EDITS[edit].inputs for edit in edits), _label(step), "stopped, and said why" if stops else SAME, []
    )
    if stops:
        outcome.faults.extend([] if process.returncode and stops in said else [f"exit code {process.returncode}: {said[-500:]}"])
        # What was made of an edited input may not be found under the key of the other.
        outcome.faults.extend([f"{step} has a result"] if (place.root / "runs" / "small" / step / "result.json").exists() else [])
    elif process.returncode:
        outcome.faults.append(f"exit code {process.returncode}: {output[-1500:]}")
    else:
        outcome.faults.extend(differences(recorded(place), wanted, _label(step)))
        named = [name for edit in edits for name in EDITS[edit].files]
        outcome.faults.extend(
            f"did not name {name}" for name in named if f"{name} has changed since this run started" not in said
        )
    return outcome


def cases_of(steps: list[str]) -> list[tuple[tuple[str, ...], str]]:
    """Which edits are made before which steps, in runs of their own."""
    reading = next(step for step in steps if _label(step) == UNREAD)
    cases = [(tuple(edit for edit in AT_ONCE if edit != "data" or step != reading), step) for step in steps]
    # A step that reads no model need not notice that it has changed.
    with_model = [step for step in steps if not step.startswith(("prepare_data", "publish_model", "write_report"))]
    return [*cases, (("data",), reading), *(((edit,), step) for edit in ("template", "weights") for step in with_model)]


def _label(step: str) -> str:
    """The step and its part, without the key."""
    return step.rpartition("-")[0]


def run_with_an_edit() -> None:
    """`grpo run small.yaml` in this process, with the edit that the environment names."""
    from flows.cli.main import app
    from grpo_tasks.running import step as steps

    ours, wanted = steps.Step._skip_or_run, os.environ[STEP]

    def edited(self, work, inputs):
        # Its key is known, its work has not begun.
        if _label(f"{work.directory.parent.name}/{work.directory.name}") == wanted:
            for edit in os.environ[EDIT].split(","):
                EDITS[edit].make()
        return ours(self, work, inputs)

    steps.Step._skip_or_run = edited
    sys.argv = ["grpo", "run", "small.yaml"]
    app()


def outcomes_in(root: Path, api: str) -> Iterator[Outcome]:
    """Every edit before every step, in folders below `root`."""

    def place(name: str) -> Place:
        (root / name).mkdir()
        return Place(root / name, api)

    first = place("undisturbed")
    wanted = undisturbed(first)
    for number, (edits, step) in enumerate(cases_of(steps_of(first))):
        yield disturbed(place(str(number)), edits, step, first, wanted)


def main() -> None:
    """Make every edit before every step, and print the table."""
    failed = False
    print("| edited | before | recorded |\n|---|---|---|")
    with tempfile.TemporaryDirectory() as folder, prefect_server(Path(folder)) as api:
        for outcome in outcomes_in(Path(folder), api):
            print(f"| {outcome.inputs} | {outcome.step} | {'; '.join(outcome.faults) or outcome.good} |", flush=True)
            failed |= bool(outcome.faults)
    raise SystemExit(failed)


if __name__ == "__main__":
    if EDIT in os.environ:
        run_with_an_edit()
    else:
        main()
