"""One fault planted in a model, its tokenizer or its template; then `grpo run`. Each must be found before the first update.

    python -m tests.flows.planted_models          prints the table: fault, what the product said, found before the first update

Found means: the run names the fault, and either does the right thing in spite of it or refuses. A run that has named it is ended.
"""

import json
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from tests.flows.place import SMALL, Place, prefect_server
from tests.variants import BOS, END, NO_END, START, variant

STRINGS = "rendered.jsonl"
"""Prompts that a chat template has rendered, as many data sets hold them."""


@dataclass(frozen=True)
class Fault:
    """A fault of the base model of a run."""

    name: str
    plant: Callable[[Path], Any]
    """Makes the model with the fault in a new folder."""
    says: str
    """Part of the sentence that names it."""
    data: dict[str, Any] | None = None
    """Another data section."""


RENDERED = {"train": [{"path": STRINGS}], "eval_fraction": 0.2}
FAULTS = (
    Fault("wrong BOS: written twice", lambda folder: variant(folder, before=(BOS,)), "they have it once", RENDERED),
    Fault("wrong BOS: left out by the template", lambda folder: variant(folder, before=(BOS,)), "the chat template does not"),
    Fault("wrong end token: EOS behind the prompt", lambda folder: variant(folder, behind=(END,)), "prompts have none", RENDERED),
    Fault(
        "wrong end token: named nowhere but in the template", lambda folder: variant(folder, eos=BOS), "it ends completions here"
    ),
    Fault("wrong end token: in the template too", lambda folder: variant(folder, eos=BOS, template=NO_END), "cut off 100.0%"),
    # To be added: faults of the forward pass and of the adapter (logit scale, soft cap, dropped keyword, one that does nothing).
)


@dataclass(frozen=True)
class Outcome:
    """What a run did about a fault."""

    fault: Fault
    said: str
    """The line that names it; empty if there is none."""
    updates: int
    """Updates made before it."""

    @property
    def found(self) -> bool:
        """True if the fault was named before the first update."""
        return bool(self.said) and self.updates == 0


def run_with(place: Place, fault: Fault, number: int) -> Outcome:
    """Start a run on a model with the fault, and read what it says until it names the fault or ends."""
    name = f"planted-{number}"
    fault.plant(place.root / name)
    rows = [
        {"prompt": f"{BOS}{START}user\nWhat is {one} + 27?{END}\n{START}assistant\n", "answer": one + 27} for one in range(11, 61)
    ]
    place.write(STRINGS, "".join(json.dumps(row) + "\n" for row in rows))
    config = SMALL | {"name": name, "model": {"path": name}} | ({} if fault.data is None else {"data": fault.data})
    place.write(f"{name}.yaml", yaml.safe_dump(config))
    process = place.start("run", f"{name}.yaml", COLUMNS="1000")
    said = next((line.strip(" │\n") for line in process.stdout if fault.says in line), "")
    journals = place.root.glob(f"runs/{name}/train_stage/*/metrics.jsonl")
    updates = sum(len(journal.read_text().splitlines()) for journal in journals)
    process.terminate()
    # The rest of its output, so that it does not wait for a reader.
    process.stdout.read()
    process.wait(timeout=120)
    return Outcome(fault, said, updates)


def main() -> None:
    """Plant each fault by itself and print the table."""
    with tempfile.TemporaryDirectory() as folder, prefect_server(Path(folder)) as api:
        (root := Path(folder) / "work").mkdir()
        outcomes = [run_with(Place(root, api), fault, number) for number, fault in enumerate(FAULTS)]
    print("| planted | the run said | before the first update |\n|---|---|---|")
    for outcome in outcomes:
        print(f"| {outcome.fault.name} | {outcome.said or 'nothing'} | {'yes' if outcome.found else 'NO'} |")
    raise SystemExit(not all(outcome.found for outcome in outcomes))


if __name__ == "__main__":
    main()
