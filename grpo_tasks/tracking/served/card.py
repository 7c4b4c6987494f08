"""The model card of a version, which MLflow shows as its description: purpose, data, figures, limits, licence of the base.

A card is replaced when the decision changes, and never where a person wrote another text. What this module does not do: measure
or decide anything. It writes down what a run knows already.
"""

import hashlib
from collections.abc import Sequence
from pathlib import Path

from jinja2 import StrictUndefined, Template
from mlflow import MlflowClient

from grpo_tasks.content.markdown import code, table
from schemas.config.run import RunConfig
from schemas.metrics import describe_figure
from schemas.paths import EMBEDDED, resolve
from schemas.results.data import DataReport
from schemas.results.evaluation import EvalReport, PairedTest
from schemas.results.model import MergeProof

_CARD = Path(__file__).with_name("card.md")
_LONGEST = 2_000
"""Characters of a system prompt that the card shows."""
_LICENCE_FILES = ("LICENSE", "LICENSE.txt", "LICENSE.md", "LICENCE", "COPYING")
_HEAD_CHARS = 20_000
CARD_TAG = "grpo.card"
"""Tag of a version: marks of the cards that it had. A description with another mark was written by a person."""
_BEFORE_DECISION, _AFTER_DECISION = "(reinforcement learning from rewards) and merged. ", "\n\n## Trained for"
_NOT_PROMOTED = "Not promoted"


def model_card(
    config: RunConfig,
    proof: MergeProof,
    evaluation: EvalReport,
    *,
    tests: Sequence[PairedTest],
    data: DataReport | None,
    decision: str,
) -> str:
    """Markdown without a headline: card.md, filled. `data` is None where the run has read none."""
    stages = [
        [stage.name, ", ".join(stage.rewards), str(stage.max_steps), f"{stage.learning_rate:g}", str(stage.num_generations)]
        for stage in config.stages
    ]
    figures = []
    for name, found in evaluation.metrics.items():
        known = describe_figure(name)
        figures.append([name, f"{found.value:.4g}", f"{found.low:.4g} to {found.high:.4g}", known.meaning if known else ""])
    columns = ["metric", "value", f"{evaluation.confidence:.0%} interval", "meaning"]
    # Markdown, not a page: nothing is escaped, and `code` has made every text of a user harmless.
    template = Template(_CARD.read_text(encoding="utf-8"), trim_blocks=True, lstrip_blocks=True, undefined=StrictUndefined)
    return template.render(
        base=code(config.model.path + (f" at revision {config.model.revision}" if config.model.revision else "")),
        decision=_sentence(decision),
        config=config,
        name=config.registered_model,
        prompt=None if config.data.system_prompt is None else code(config.data.system_prompt[:_LONGEST]),
        stages=table(["stage", "rewards", "updates at most", "learning rate", "group size"], stages),
        sources=", ".join(str(code(source.path)) for source in config.data.train),
        data=data,
        evaluation=evaluation,
        figures=table(columns, figures, right=["value"]),
        tests=tests,
        proof=proof,
        licence=licence(config.model.path),
    )


def decision_text(promoted: bool, reason: str) -> str:
    """The decision as a card says it."""
    return f"{'Promoted' if promoted else _NOT_PROMOTED}: {reason}"


def says_not_promoted(description: str | None) -> bool:
    """Whether the card of a version says that it was not promoted."""
    return (description or "").partition(_BEFORE_DECISION)[2].startswith(_NOT_PROMOTED)


def write_card(client: MlflowClient, name: str, version: str, card: str) -> None:
    """Make the card the description of a version, unless a person wrote the present one. Can be repeated."""
    found = client.get_model_version(name, version)
    present, marks = found.description or "", found.tags.get(CARD_TAG, "").split()
    if present == card and _mark(card) in marks:
        return
    if present not in ("", card) and _mark(present) not in marks:
        return
    # Both marks, and the tag first: a kill before the next call leaves the present text known as a card.
    client.set_model_version_tag(name, version, CARD_TAG, " ".join(dict.fromkeys([_mark(card), _mark(present)])))
    client.update_model_version(name, version, card)


def restate_decision(client: MlflowClient, name: str, version: str, decision: str) -> None:
    """Replace the decision in the card of a version, unless a person wrote another text."""
    before, said, rest = (client.get_model_version(name, version).description or "").partition(_BEFORE_DECISION)
    _, section, after = rest.partition(_AFTER_DECISION)
    if said and section:
        write_card(client, name, version, f"{before}{said}{_sentence(decision)}{section}{after}")


def _mark(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _sentence(text: str) -> str:
    return text[:1].upper() + text[1:].rstrip(".") + "." if text else ""


def licence(path: str) -> str:
    """What is known about the licence of a base model, without asking the network."""
    if path.startswith(EMBEDDED):
        return "The embedded model ships with this project, under the project's licence."
    folder = Path(resolve(path))
    if not folder.is_dir():
        return f"See https://huggingface.co/{path}."
    declared = _front_matter(folder / "README.md").get("license")
    if declared:
        return f"Declared in its README.md: {code(declared)}."
    named = next((name for name in _LICENCE_FILES if (folder / name).is_file()), None)
    return f"See {named} in its folder." if named else "Unknown: its folder names none. Find it out before you pass the model on."


def _front_matter(readme: Path) -> dict[str, str]:
    """The lines `name: value` between the `---` at the beginning of a file; a hub model declares its licence there."""
    if not readme.is_file():
        return {}
    with readme.open(encoding="utf-8", errors="replace") as file:
        head = file.read(_HEAD_CHARS).split("\n---", 1)[0]
    if not head.startswith("---\n"):
        return {}
    pairs = (line.partition(":") for line in head.splitlines())
    return {name: value.strip() for name, _, value in pairs if value.strip()}
