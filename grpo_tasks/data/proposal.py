"""A data file that nobody has described -> a commented config that the validation step accepts (`grpo init`).

Names and values of the first rows give candidates; the first one that passes the pipeline's own validation is taken. Nothing is
written but a temporary folder. The limits of the proposal (prompt length, share of refused rows) are those of the trial, so `grpo
validate` agrees with it.
"""

import json
import math
import re
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import polars as pl

from grpo_tasks.answers.ground_truths import find_pattern, find_unusable_truths
from grpo_tasks.data.normalise import normalise_column
from grpo_tasks.data.sources import ROWS, load_sources, preview
from grpo_tasks.data.validation import Origin, validate_rows
from schemas.config.completion import CompletionConfig, Equality
from schemas.config.data import DataConfig, DataSource, ValidationConfig
from schemas.config.load import check_config, parse_yaml
from schemas.config.rollout import RolloutConfig
from schemas.config.run import RunConfig
from schemas.config.stage import StageConfig
from schemas.errors import DataError

QUESTIONS = ("question", "problem", "query", "instruction", "quiz", "input", "prompt", "task", "text", "source")
"""Usual names of a question's column, best first. A column that only contains one of them comes after all of these."""
ANSWERS = (
    *("answer", "target", "final_answer", "expert_answer", "ground_truth", "label", "expected", "gold", "solution"),
    *("solution_text", "output", "response", "completion", "result"),
)
CONTEXTS = ("body", "context", "passage", "premise", "input")
"""Columns that a question may refer to: SVAMP's Body, SQuAD's context, Alpaca's input."""
FILLED = 0.9
"""Share of rows in which a column must hold a value of its kind."""
PREVIEW_ROWS = 500
"""Rows that decide about columns, pattern and equality."""
TRIAL_ROWS = 20_000
"""Rows that are validated to find the limits."""
SYSTEM_PROMPT = "Reply with <reasoning>...</reasoning><answer>...</answer>."
COMPLETION_TOKENS = 128
MOST_PROMPT_TOKENS = 2048 - COMPLETION_TOKENS
"""What the context of the embedded model leaves."""
MOST_REFUSED = 0.5
_LONGEST_CHOICE = 3
_HELD_OUT = ("test", "eval", "validation", "valid", "dev")
_PLAIN = re.compile(r"[A-Za-z_][A-Za-z0-9_./-]*")
_YAML_WORDS = {"null", "true", "false", "yes", "no", "on", "off", "y", "n"}
_MEANINGS = {
    "question": "template that joins columns into the question",
    "question_column": "column with the question",
    "prompt_column": "column with chat messages",
    "answer_column": "column with the ground truth",
    "answer_pattern": "its first group is the ground truth",
}

Rows = Sequence[Mapping[str, object]]


@dataclass(frozen=True, slots=True)
class ColumnChoice:
    """One way to read the rows of a file."""

    question: str | None
    """Column of the bare question; None when `chat` has the prompt."""
    chat: str | None
    """Column of chat messages."""
    answer: str | None
    """Column of the ground truth; None: the task has none."""
    context: str | None = None
    """Column that stands before the question, because the question alone cannot be understood."""


@dataclass(frozen=True, slots=True)
class Proposal:
    """What the config says about a data file, and why."""

    train: str
    """Path of the file, as the user gave it."""
    eval: str | None
    """Path of a file of held-out rows next to it."""
    choice: ColumnChoice
    pattern: str | None
    pattern_meaning: str
    equality: Equality
    columns: list[str]
    rows: int
    refused: int
    reasons: list[str]
    """The rules that refuse rows, with counts."""
    max_prompt_length: int

    @property
    def max_invalid_fraction(self) -> float:
        """The default of the pipeline, or somewhat more than what this file has."""
        share = self.refused / max(self.rows, 1)
        return 0.01 if share <= 0.01 else math.ceil(120 * share) / 100


def propose(path: str, *, question: str | None = None, answer: str | None = None) -> Proposal:
    """The first reading of the file that the pipeline accepts; `DataError` where there is none, or the file cannot be read.

    `question` and `answer` are columns that the user has named; an empty answer: the task has no ground truth.
    """
    rows = preview(DataSource(path=path), PREVIEW_ROWS)
    found = [choice for choice in candidates(rows) if question in (None, choice.question, choice.chat)]
    if answer is not None:
        found = [ColumnChoice(one.question, one.chat, answer or None, one.context) for one in found]
    refusals: list[str] = []
    for choice in found:
        texts = [str(row[choice.answer]) for row in rows if choice.answer and row.get(choice.answer) is not None]
        try:
            with tempfile.TemporaryDirectory() as folder:
                return _tried(path, choice, find_pattern(texts), _columns(rows), Path(folder))
        except DataError as error:
            refusals.append(f"{choice.question or choice.chat}: {error.message.splitlines()[0]}")
    raise DataError(
        "no column holds questions that can be used" + "".join(f"\n  {refusal}" for refusal in refusals),
        place=f"{path} (columns: {', '.join(_columns(rows))})",
        fix="name the columns: grpo init FILE --question COLUMN --answer COLUMN",
    )


def candidates(rows: Rows) -> list[ColumnChoice]:
    """Every plausible way to read the rows: chats before questions, likelier columns first; empty when no column holds text.

    Names order the columns, and values decide whether one is a candidate at all: `prompt` may hold text or messages.
    """
    columns = _columns(rows)

    def holding(fits: Callable[[object], bool]) -> list[str]:
        return [column for column in columns if sum(fits(row.get(column)) for row in rows) / max(len(rows), 1) >= FILLED]

    chats, texts = holding(_is_chat), holding(_is_text)
    values = holding(lambda value: _is_text(value) or (isinstance(value, int | float) and not isinstance(value, bool)))
    named = [column for column in values if _rank(column, ANSWERS) < 2 * len(ANSWERS)]
    answer = min(named, key=lambda column: _rank(column, ANSWERS), default=None)
    # A column whose text is always the same asks nothing.
    asking = [column for column in texts if len({str(row.get(column)) for row in rows}) > len(rows) / 20]
    # Without a familiar name the longest text is the likeliest question.
    asking.sort(key=lambda column: -sum(len(str(row.get(column) or "")) for row in rows))
    familiar = [column for column in columns if column in asking and _rank(column, QUESTIONS) < 2 * len(QUESTIONS)]
    questions = sorted(familiar, key=lambda column: _rank(column, QUESTIONS))
    questions += [column for column in asking if column not in familiar]

    def context(question: str) -> str | None:
        if _rank(question, QUESTIONS) >= len(QUESTIONS):
            return None
        return next((one for one in texts if one.lower() in CONTEXTS and one not in (question, answer)), None)

    return [ColumnChoice(None, column, answer) for column in chats] + [
        ColumnChoice(column, None, answer, context(column)) for column in questions if column != answer
    ]


def _columns(rows: Rows) -> list[str]:
    return list(dict.fromkeys(str(column) for row in rows for column in row))


def _rank(column: str, names: Sequence[str]) -> int:
    """Place of a column among usual names: exact ones first, then columns that contain one. Neither: twice their number."""
    plain = column.lower().strip().replace(" ", "_")
    if plain in names:
        return names.index(plain)
    parts = plain.split("_")
    return next((len(names) + place for place, name in enumerate(names) if name in parts), 2 * len(names))


def _is_text(value: object) -> bool:
    return isinstance(value, str) and bool(value.strip())


def _is_chat(value: object) -> bool:
    return (
        isinstance(value, list)
        and bool(value)
        and all(isinstance(item, Mapping) and {"role", "content"} <= item.keys() for item in value)
    )


def data_settings(choice: ColumnChoice, columns: list[str], pattern: str | None) -> dict[str, object]:
    """The settings of section `data` that describe a reading."""
    settings: dict[str, object] = {}
    if choice.context:
        settings["question"] = f"{{{choice.context}}} {{{choice.question}}}"
    elif choice.question:
        settings["question_column"] = choice.question
    if choice.chat:
        settings["prompt_column"] = choice.chat
    elif "prompt" in columns or choice.question == "prompt":
        # A column called prompt would win over the question; this name is no column.
        settings["prompt_column"] = "no_prompt_column"
    settings["answer_column"] = choice.answer
    if pattern:
        settings["answer_pattern"] = pattern
    return settings


def _tried(path: str, choice: ColumnChoice, pattern: tuple[str, str] | None, columns: list[str], folder: Path) -> Proposal:
    """Validate the file with this reading; raises `DataError` when the rules refuse most rows."""
    # The file of held-out rows that belongs to a file of training rows: test.jsonl next to train.jsonl.
    file = Path(path)
    siblings = [file.with_name(file.name.replace("train", other)) for other in _HELD_OUT if "train" in file.stem]
    held_out = next((str(other) for other in siblings if other.is_file()), None)
    sources = {"train": [{"path": path, "max_rows": TRIAL_ROWS}]} | ({"eval": [{"path": held_out}]} if held_out else {})
    settings = data_settings(choice, columns, pattern[0] if pattern else None)
    data = DataConfig.model_validate(sources | settings | {"system_prompt": SYSTEM_PROMPT})
    # The stage trains nothing here: a config has one.
    config = RunConfig(
        data=data,
        validation=ValidationConfig(max_invalid_fraction=1.0, max_prompt_length=MOST_PROMPT_TOKENS),
        completion=CompletionConfig(equality="exact"),
        rollout=RolloutConfig(max_completion_length=COMPLETION_TOKENS),
        stages=[StageConfig(name="train", rewards=["format"])],
        seed=42,
    )
    read = load_sources(data, directory=folder)
    report = validate_rows(folder / ROWS, config, Origin("", folder, 0.0, read))
    if report.quarantined > MOST_REFUSED * report.rows:
        worst = max(report.rules, key=lambda rule: rule.rows)
        raise DataError(f"{report.quarantined:,} of {report.rows:,} rows are refused: {worst.meaning}")
    truths = pl.read_parquet(report.train, columns=["answer"])["answer"].drop_nulls().head(PREVIEW_ROWS).to_list()
    return Proposal(
        train=path,
        eval=held_out,
        choice=choice,
        pattern=pattern[0] if pattern else None,
        pattern_meaning=pattern[1] if pattern else "",
        equality=find_equality(truths) if choice.answer else "exact",
        columns=columns,
        rows=report.rows,
        refused=report.quarantined,
        reasons=[f"{rule.rows:,} x {rule.meaning}" for rule in report.rules if rule.rows],
        max_prompt_length=min(MOST_PROMPT_TOKENS, 32 * math.ceil(report.prompt_tokens.max / 32)),
    )


def find_equality(truths: Sequence[str]) -> Equality:
    """How these ground truths are compared: as letters, numbers or expressions if all of them are such, otherwise as text."""
    rows = pl.DataFrame({"answer": truths}, schema={"answer": pl.String}).with_row_index("line")
    rows = rows.with_columns(answer=normalise_column(pl.col("answer")), source=pl.lit(""))
    short = bool((rows["answer"].str.len_chars() <= _LONGEST_CHOICE).all())
    kinds: list[Equality] = ["numeric", "choice", "math"] if short else ["numeric", "math"]
    for kind in kinds:
        if truths and find_unusable_truths(rows, kind).count == 0:
            return kind
    return "exact"


def config_text(proposal: Proposal, *, name: str, model: str, config_path: str) -> str:
    """The proposal as YAML, checked before it is returned: what is written can be loaded. Its first lines name `config_path`."""
    reasons = "".join(f"\n  # {_comment(reason)}" for reason in proposal.reasons)
    equality = (
        f"\ncompletion:\n  equality: {proposal.equality}    # exact | numeric | math | choice\n" if proposal.choice.answer else ""
    )
    text = f"""\
# Written by grpo init. Paths are relative to the folder where you call grpo.
#   grpo validate {config_path}    checks every row
#   grpo rewards {config_path}     tests the rewards, without any training
#   grpo run {config_path}         trains, evaluates and registers the model
# grpo fields WORD explains every setting.

name: {_scalar(name)}    # folder below runs/, MLflow experiment and registered model
seed: 42

model:
  path: {_scalar(model)}    # a folder, a hub id such as Qwen/Qwen2.5-0.5B-Instruct, or a registered model NAME@champion;
                            # embedded:base is a tiny model that runs anywhere and knows only small sums
  lora: {{r: 16, lora_alpha: 32}}    # null: train every weight

{_data(proposal)}
validation:
  max_prompt_length: {proposal.max_prompt_length}    # tokens; longer prompts are quarantined, never cut
  max_invalid_fraction: {proposal.max_invalid_fraction}    # {proposal.refused:,} of {proposal.rows:,} rows of this file are \
refused; more stop the run{reasons}
{equality}
rollout:
  max_completion_length: {COMPLETION_TOKENS}    # tokens
  temperature: 1.0

{_stages(proposal)}
evaluation: {{max_prompts: 64, num_samples: 4}}
"""
    check_config(parse_yaml(text, place=config_path), place=config_path)
    return text


def _data(proposal: Proposal) -> str:
    lines = ["data:", f"  train: [{{path: {_scalar(proposal.train)}}}]"]
    if proposal.eval:
        lines.append(f"  eval: [{{path: {_scalar(proposal.eval)}}}]    # held-out rows")
    else:
        lines.append("  eval_fraction: 0.1    # share of the rows that is held out for evaluation")
    lines.append(f"  # columns of the file: {_comment(', '.join(proposal.columns))}")
    for key, value in data_settings(proposal.choice, proposal.columns, proposal.pattern).items():
        meaning = proposal.pattern_meaning if key == "answer_pattern" else _MEANINGS[key]
        if key == "answer_column" and value is None:
            meaning = "the file has no ground truth"
        if value == "no_prompt_column":
            meaning = "the column `prompt` is not used"
        lines.append(f"  {key}: {_scalar(value)}    # {_comment(meaning)}")
    lines.append(f"  system_prompt: {_scalar(SYSTEM_PROMPT)}    # names the tags of section completion")
    return "\n".join(lines) + "\n"


def _stages(proposal: Proposal) -> str:
    own = "    # add your own: rewards.functions.NAME.function: 'module:function'"
    stages = f"""\
stages:
  - &stage
    name: format    # first learn the tags ...
    rewards: [incremental_format, format]{"" if proposal.choice.answer else own}
    max_steps: 50
    num_generations: 8    # completions per prompt
    per_device_train_batch_size: 16    # completions per pass
    learning_rate: 1.0e-4
    beta: 0.01    # strength of the KL penalty
"""
    if proposal.choice.answer:
        stages += """\
  - <<: *stage
    name: correctness    # ... then right answers, from the model of the first stage
    rewards: [format, correctness]    # correctness compares with the ground truth
    max_steps: 100
"""
    return stages


def _scalar(value: object) -> str:
    """A YAML scalar in one line: bare where that is safe, in double quotes otherwise."""
    if isinstance(value, str) and _PLAIN.fullmatch(value) and value.lower() not in _YAML_WORDS:
        return value
    return json.dumps(value, ensure_ascii=False)


def _comment(text: str) -> str:
    """Text for a comment: one line, of bounded length."""
    line = " ".join(text.split())
    return line if len(line) <= 150 else line[:149] + "…"
