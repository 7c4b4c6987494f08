"""One flipped byte in each kind of file that a finished run has left; then the same command again. Nothing false may come of it.

    python -m tests.flows.planted          prints the table: kind of file, what the next run did

Each kind is planted by itself into the same finished run. The next run must name the file, and either make it again (then every
result agrees with its manifest, and what is published is what it was) or refuse; the version published before stays downloadable.
"""

import json
import re
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import yaml

from grpo_tasks.content.hashes import find_changes, folder_sha256
from schemas.results.base import OutputFile
from tests.flows.place import SMALL, Place, prefect_server

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


@dataclass(frozen=True)
class Outcome:
    """What the next run did about a flipped byte."""

    kind: Kind
    what: str
    wrong: str = ""
    """What must not be, if anything is."""


def finished_run(place: Place) -> None:
    """A run whose model is champion, evaluated from the registry."""
    place.write("small.yaml", yaml.safe_dump(CONFIG))
    place.grpo(*RUN)
    place.client.set_registered_model_alias("small", "champion", "1")
    place.grpo(*EVALUATE)
    # The decision is another one now, and with it the report.
    place.grpo(*RUN)


def plant(place: Place, kinds: tuple[Kind, ...], number: int) -> list[Outcome]:
    """Flip a byte in a file of each kind, run the command once, and look at what has become of the files."""
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
    outcomes = []
    for kind, path in paths.items():
        again = path.exists() and path.read_bytes() == before[kind]
        named = path.name in plain
        what = f"refused: {_last_line(said)}" if process.returncode else "made again, the same bytes" if again else "made again"
        wrong = "" if named else "the file was not named"
        if process.returncode and command == DOWNLOAD:
            path.write_bytes(before[kind])
        elif process.returncode:
            wrong = wrong or "the same command did not make it again"
        outcomes.append(Outcome(kind, what, wrong))
    faults = [*_faults(place), *(["what is published has changed"] if _published(place) != published else [])]
    faults += _download(place, number)
    return [Outcome(one.kind, one.what, "; ".join(filter(None, [one.wrong, *faults]))) for one in outcomes]


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
        return [f"version 1 cannot be downloaded any more: {_last_line(said)}"]
    (folder / "grpo.json").unlink()
    return [] if folder_sha256(folder) == dict(_published(place))[1] else ["version 1 is another model now"]


def _last_line(text: str) -> str:
    lines = [line.strip("│ ") for line in text.splitlines() if line.strip("│╭╮╰╯─ ")]
    return lines[-1] if lines else ""


def main() -> None:
    """Plant each kind by itself and print the table."""
    with tempfile.TemporaryDirectory() as folder, prefect_server(Path(folder)) as api:
        (root := Path(folder) / "work").mkdir()
        place = Place(root, api)
        finished_run(place)
        outcomes = [outcome for number, kind in enumerate(KINDS) for outcome in plant(place, (kind,), number)]
    print("| one flipped byte in | the next run | wrong |\n|---|---|---|")
    for outcome in outcomes:
        print(f"| {outcome.kind.name} (`{outcome.kind.pattern}`) | {outcome.what} | {outcome.wrong or 'nothing'} |")
    raise SystemExit(any(outcome.wrong for outcome in outcomes))


if __name__ == "__main__":
    main()
