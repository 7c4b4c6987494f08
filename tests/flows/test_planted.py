"""One flipped byte in each kind of file that a finished run has left; then the same command again. Nothing false may come of it.

The next run must name the file, and either make it again (every result then agrees with its manifest, and what is published is
what it was) or refuse; the version published before stays downloadable.
"""

import json
import re
import shutil
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path

import pytest
import yaml

from grpo_tasks.content.hashes import find_changes, folder_sha256
from grpo_tasks.running.step import REBUILT, RESULT
from schemas.results.base import OutputFile
from tests.flows.place import SMALL, Place

pytestmark = [pytest.mark.long, pytest.mark.xdist_group("planted"), pytest.mark.timeout(1800)]

CONFIG = SMALL | {"stages": [SMALL["stages"][0] | {"save_total_limit": 2, "log_completions_steps": 2, "beta": 0.01}]}
RUN = ("run", "small.yaml")
EVALUATE = ("evaluate", "models:/small@champion", "small.yaml")
DOWNLOAD = ("download", "small/1")


@dataclass(frozen=True)
class Kind:
    """A kind of file, and the command that meets it next."""

    name: str
    pattern: str
    command: tuple[str, ...] = RUN


KINDS = (
    Kind("rows as read", "runs/small/prepare_data/*/rows.parquet"),
    Kind("accepted training rows", "runs/small/validate_data/*/train.parquet"),
    Kind("accepted held-out rows", "runs/small/validate_data/*/eval.parquet"),
    Kind("quarantined rows", "runs/small/validate_data/*/quarantine.parquet"),
    Kind("report on the data", "runs/small/validate_data/*/report.md"),
    Kind("probes of the reward lab", "runs/small/probe_rewards/*/probes.parquet"),
    Kind("stage: specification", "runs/small/train_stage/*/spec.json"),
    Kind("stage: journal", "runs/small/train_stage/*/metrics.jsonl"),
    Kind("stage: completions", "runs/small/train_stage/*/completions/*.parquet"),
    Kind("stage: checkpoint, optimizer", "runs/small/train_stage/*/checkpoints/*/optimizer.safetensors"),
    Kind("stage: checkpoint, weights", "runs/small/train_stage/*/checkpoints/*/weights/adapter_model.safetensors"),
    Kind("stage: adapter", "runs/small/train_stage/*/final/adapter_model.safetensors"),
    Kind("stage: adapter's settings", "runs/small/train_stage/*/final/adapter_config.json"),
    Kind("stage: result", "runs/small/train_stage/*/result.json"),
    Kind("merged model: weights", "runs/small/merge_adapter/*/model/model.safetensors"),
    Kind("merged model: tokenizer", "runs/small/merge_adapter/*/model/tokenizer.json"),
    Kind("merged model: result", "runs/small/merge_adapter/*/result.json"),
    Kind("evaluation: samples", "runs/small/evaluate_model/merged-*/samples.parquet"),
    Kind("evaluation: result", "runs/small/evaluate_model/merged-*/result.json"),
    Kind("report of the run", "runs/small/write_report/*/report.html"),
    Kind("fetched champion", "runs/small/downloads/*/model.safetensors", EVALUATE),
    Kind("store: weights", "mlruns/**/model.safetensors", DOWNLOAD),
    Kind("store: manifest", "mlruns/**/publication/manifest-*.json", DOWNLOAD),
)


@pytest.fixture(scope="module")
def place(tmp_path_factory, prefect_api) -> Place:
    """With a run whose model is champion, evaluated from the registry."""
    place = Place(tmp_path_factory.mktemp("planted"), prefect_api)
    place.write("small.yaml", yaml.safe_dump(CONFIG))
    place.grpo(*RUN)
    place.client.set_registered_model_alias("small", "champion", "1")
    place.grpo(*EVALUATE)
    # The decision is another one now, and with it the report.
    place.grpo(*RUN)
    return place


def plant(place: Place, kinds: tuple[Kind, ...], number: int) -> dict[str, list[str]]:
    """Flip a byte in a file of each kind, run the command once; what must not be, by kind."""
    # What a damaged stage has left aside is used by nobody.
    paths = {kind: _newest(path for path in place.root.glob(kind.pattern) if ".damaged-" not in str(path)) for kind in kinds}
    before = {kind: path.read_bytes() for kind, path in paths.items()}
    published = _published(place)
    for path in paths.values():
        flip_byte(path)
    [command] = {kind.command for kind in kinds}
    arguments = (*command, str(place.root / f"download-{number}")) if command == DOWNLOAD else command
    process = place.start(*arguments)
    said, _ = process.communicate(timeout=900)
    plain = re.sub(r"[\s│╭╮╰╯─]+", "", said)
    wrong = {kind.name: [] if path.name in plain else ["the file was not named"] for kind, path in paths.items()}
    for kind, path in paths.items():
        if process.returncode and command == DOWNLOAD:
            path.write_bytes(before[kind])
        elif process.returncode:
            wrong[kind.name].append("the same command did not make it again")
    faults = [*_faults(place), *(["what is published has changed"] if _published(place) != published else [])]
    faults += _download(place, number)
    return {name: found + faults for name, found in wrong.items()}


def _newest(paths: Iterable[Path]) -> Path:
    """Of the folders of a step the one that the next run will use."""
    return max(paths, key=lambda path: (path.stat().st_mtime_ns, path))


def flip_byte(path: Path) -> None:
    """Change one bit in the middle of a file, in place."""
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def _published(place: Place) -> list[tuple[int, str]]:
    found = place.client.search_model_versions("name='small'")
    return sorted((int(version.version), version.tags["grpo.sha256"]) for version in found)


def _faults(place: Place) -> list[str]:
    """Finished steps whose files are not those of their manifest."""
    faults = []
    for path in place.root.glob("runs/small/*/*/result.json"):
        manifest = [OutputFile(**entry) for entry in json.loads(path.read_text())["manifest"]]
        faults += [f"{path.parent.name}: {change}" for change in find_changes(path.parent, manifest)]
    return faults


def _download(place: Place, number: int) -> list[str]:
    """Whether the version published first is still what it was."""
    folder = place.root / f"intact-{number}"
    process = place.start("download", "small/1", folder)
    said, _ = process.communicate(timeout=900)
    if process.returncode:
        return [f"version 1 cannot be downloaded any more: {said[-500:]}"]
    (folder / "grpo.json").unlink()
    return [] if folder_sha256(folder) == dict(_published(place))[1] else ["version 1 is another model now"]


def rounds():
    """Kinds that one run meets together: of each step those with the same remedy, so that no damage hides another."""
    steps = {}
    for kind in KINDS:
        if kind.command == RUN:
            _, _, step, _, file = kind.pattern.split("/", 4)
            remedy = RESULT if file == RESULT else file.split("/")[0] in REBUILT
            steps.setdefault(step, {}).setdefault(remedy, []).append(kind)
    for met in zip_longest(*([*remedies.values()] for remedies in steps.values()), fillvalue=[]):
        yield tuple(kind for kinds in met for kind in kinds)
    yield from ((kind,) for kind in KINDS if kind.command in (EVALUATE, DOWNLOAD))


def test_another_adapter_in_the_same_folder_is_evaluated_again(place):
    [first] = place.root.glob("runs/small/train_stage/*/final")
    adapter = place.root / "ad"
    shutil.copytree(first, adapter)
    shown = place.grpo("evaluate", "ad", "small.yaml")
    assert "unchanged, skipped" in place.grpo("evaluate", "ad", "small.yaml")
    place.grpo("train", "small.yaml", "--set", "stages.0.learning_rate=0.05", "--set", "name=other")
    [second] = place.root.glob("runs/other/train_stage/*/final")
    shutil.copytree(second, adapter, dirs_exist_ok=True)
    again = place.grpo("evaluate", "ad", "small.yaml")
    assert re.search(r"evaluate_model-model: done in", again)
    rows, before = ([line for line in one.splitlines() if line.startswith("model\t")] for one in (again, shown))
    assert len(rows) == len(before) == 2
    assert rows != before


def test_a_flipped_byte_is_repaired_or_refused_with_its_file(place):
    wrong = {name: found for number, kinds in enumerate(rounds()) for name, found in plant(place, kinds, number).items()}
    assert len(wrong) == len(KINDS)
    assert {name: found for name, found in wrong.items() if found} == {}
