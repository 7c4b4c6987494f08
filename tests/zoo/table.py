"""The table of the zoo: the verdict of each model as it was last measured (table.json), from which docs/models.md is made."""

import json
import re
from pathlib import Path
from typing import Any

import transformers

from tests.zoo.kinds import LEFT_OUT, VARIANTS, ZOO
from tests.zoo.measure import Verdict

PATH = Path(__file__).parent / "table.json"

MAIN = (
    "qwen2", "qwen3", "qwen3_moe", "llama", "llama_llama3", "gemma2", "gemma3_text", "mistral", "phi3", "granite", "cohere2",
    "smollm3", "olmo2", "gpt2", "nemotron",
)  # fmt: skip
"""Models of the families that people train; the others are measured in the long tests."""

_FOLDER = re.compile(r"/\S+?/zoo-[\w-]+")
_NUMBER = re.compile(r"(?<![\w.])\d+(?:\.\d+)?(?:e-?\d+)?(?= nats)")


def load() -> dict[str, Any]:
    """The committed table."""
    table: dict[str, Any] = json.loads(PATH.read_text(encoding="utf-8"))
    return table


def row(verdict: Verdict) -> dict[str, Any]:
    """A verdict as a row of the table. Differences depend on the machine, and so are left out of the sentences."""
    kind, _ = ZOO[verdict.name]
    has = VARIANTS[verdict.name][1] if verdict.name in VARIANTS else ""
    sentences = {_NUMBER.sub("...", _FOLDER.sub("FOLDER", sentence)) for sentence in verdict.sentences}
    # The notice of a part that goes on says nothing about a run that is refused.
    shown = {sentence for sentence in sentences if " fix: " in sentence} if verdict.refused else sentences
    return {"type": kind, "has": has, "way": verdict.way, "sentences": sorted(shown)}


def write(verdict: Verdict) -> None:
    """Write the row of a model into the table."""
    models = load()["models"] if PATH.exists() else {}
    models[verdict.name] = row(verdict)
    table = {
        "transformers": transformers.__version__,
        "main": list(MAIN),
        "models": {name: models[name] for name in ZOO if name in models},
        "left_out": LEFT_OUT,
    }
    PATH.write_text(json.dumps(table, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
