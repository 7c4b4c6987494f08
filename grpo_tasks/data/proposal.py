"""A data file that nobody has described -> a commented config that the validation step accepts (`grpo init`).

columns.py gives candidates; the first one of which the rules of the validation refuse few rows is taken, however few rows the
file has. Nothing is written but a temporary folder. The limits of the proposal (prompt length, share of refused rows) are those
of the trial, which counts with the tokenizer of the model that is to be trained, so `grpo validate` agrees with it. The settings
of the training are those of a tiny model for the embedded one, and for any other those of deploy/presets/custom-csv.yaml.
"""

import glob
import json
import math
import re
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

import polars as pl

from grpo_tasks.answers.ground_truths import find_pattern, find_unusable_truths
from grpo_tasks.content.limited_model import limited_templates
from grpo_tasks.content.model_files import context_length
from grpo_tasks.content.places import row_place
from grpo_tasks.content.shards import is_pattern, shards_of
from grpo_tasks.content.tokenizer import template_variables
from grpo_tasks.data.chat_tokens import TokenCounter, load_counter
from grpo_tasks.data.columns import ColumnChoice, Rows, candidates, left_out
from grpo_tasks.data.judge import RowVerdict, judge
from grpo_tasks.data.model_names import NameHints
from grpo_tasks.data.normalise import DecimalCommas, normalise_column
from grpo_tasks.data.records import CHAT_COLUMNS
from grpo_tasks.data.sources import ROWS, load_sources, preview
from grpo_tasks.data.tokenizer_notes import check_system_prompt
from schemas.config.completion import CompletionConfig, Equality
from schemas.config.data import DataConfig, DataSource, ValidationConfig
from schemas.config.load import check_config, parse_yaml
from schemas.config.model import ModelConfig
from schemas.config.rollout import RolloutConfig
from schemas.config.run import RunConfig
from schemas.config.stage import StageConfig
from schemas.errors import DataError, UserError
from schemas.paths import EMBEDDED

PREVIEW_ROWS = 500
"""Rows that decide about columns and pattern, from the beginning of the file, and about the equality, from all of it."""
TRIAL_ROWS = 20_000
"""Rows that are validated to find the limits."""
SYSTEM_PROMPT = "Reply with <reasoning>...</reasoning><answer>...</answer>."
POINTS_PROMPT = f"{SYSTEM_PROMPT} Write decimals with a point, as in 1.5."
MOST_CONTEXT = 8192
"""Tokens of prompt and completion together that are proposed for a model that could read more."""
MOST_REFUSED = 0.5
_WITH_UNIT = r"^\s*([A-Z]{3})?\s*([-+\x{2212}]?[0-9][0-9.,'\x{a0}\x{202f}]*)\s*([\p{L}°µ][\p{L}°µ²³/]{0,11})?\s*$"
_LONGEST_CHOICE = 3
_HELD_OUT = ("test", "eval", "validation", "valid", "dev")
_PLAIN = re.compile(r"[A-Za-z_][A-Za-z0-9_./-]*")
_YAML_WORDS = {"null", "true", "false", "yes", "no", "on", "off", "y", "n"}
_MEANINGS = {
    "question": "template that joins columns into the question; one with ? may be empty",
    "rename": "the chat, whose last reply is no part of the prompt",
    "question_column": "column with the question",
    "prompt_column": "column with chat messages",
    "answer_column": "column with the ground truth",
    "answer_pattern": "its first group is the ground truth",
}


@dataclass(frozen=True, slots=True)
class Training:
    """Settings of a training by the size of its model."""

    max_completion_length: int
    """Tokens."""
    max_steps: tuple[int, int]
    """Of the stages format and correctness."""
    per_device_train_batch_size: int
    gradient_accumulation_steps: int
    learning_rate: str
    beta: float
    eval_prompts: int


TINY = Training(128, (50, 100), 16, 1, "1.0e-4", 0.01, 64)
"""Of the embedded model, on a CPU."""
PRETRAINED = Training(256, (100, 500), 8, 4, "5.0e-5", 0.04, 256)
"""Of the preset custom-csv."""


@dataclass(frozen=True, slots=True)
class Reader:
    """The model that is to be trained, as far as it reads the data."""

    path: str
    counter: TokenCounter
    context: int
    """Tokens of prompt and completion together."""
    note: str = ""
    """Why another tokenizer counts; empty where it is the model's own."""

    @classmethod
    def of(cls, model: str) -> "Reader":
        """The model at a path. One that is not on this machine, or reads no chats, is read with the embedded tokenizer."""
        try:
            counter = load_counter(ModelConfig(path=model))
            check_system_prompt(counter.tokenizer, SYSTEM_PROMPT)
            return cls(model, counter, min(context_length(model) or MOST_CONTEXT, MOST_CONTEXT))
        except UserError as error:
            # `grpo validate` says what to do about it; a registered model or one of a hub may just not be here yet.
            note = f"counted in tokens of embedded:base, about one a character, because of {model}: {error.message}"
            return cls(model, load_counter(ModelConfig()), MOST_CONTEXT, note)

    @property
    def training(self) -> Training:
        """Settings that suit it."""
        return TINY if self.path.startswith(EMBEDDED) else PRETRAINED

    @property
    def max_prompt_length(self) -> int:
        """The longest prompt that leaves room for a completion."""
        return self.context - self.training.max_completion_length


@dataclass(frozen=True, slots=True)
class Proposal:
    """What the config says about a data file, and why."""

    reader: Reader
    train: str
    """Path of the file, folder or pattern, as the user gave it."""
    eval: dict[str, str] | None
    """Source of held-out rows that belongs to it."""
    choice: ColumnChoice
    pattern: str | None
    pattern_meaning: str
    equality: Equality
    system_prompt: str
    columns: list[str]
    left_out: list[tuple[str, str]]
    """Columns that are neither prompt nor ground truth, each with the reason."""
    commas: list[DecimalCommas]
    rows: int
    refused: int
    reasons: list[str]
    """The rules that refuse rows, with counts."""
    max_prompt_length: int
    objects: "ObjectTruths | None"
    """None where ground truths are no objects."""
    answer_tokens: int
    """Of the longest answer in the file, with the working that it has, in a chat."""

    @property
    def max_completion_length(self) -> int:
        """Tokens; room for any answer of the file. The embedded model writes no working, and the trial counts none for it."""
        least = self.reader.training.max_completion_length
        return min(max(least, 32 * math.ceil(1.25 * self.answer_tokens / 32)), self.reader.context - self.max_prompt_length)

    @property
    def has_truth(self) -> bool:
        """Whether completions are compared with a ground truth."""
        return self.choice.answer is not None or self.choice.reply_is_truth

    @property
    def max_invalid_fraction(self) -> float:
        """The default of the pipeline, or somewhat more than what this file has."""
        share = self.refused / max(self.rows, 1)
        return 0.01 if share <= 0.01 else math.ceil(120 * share) / 100


@dataclass(frozen=True, slots=True)
class ObjectTruths:
    """Ground truths that are JSON objects."""

    keys: list[str]
    """Those that all of them have."""
    system_prompt: str

    @classmethod
    def of(cls, truths: Sequence[str]) -> "ObjectTruths":
        """What some of them have in common."""
        objects = [json.loads(truth) for truth in truths]
        keys = [key for key in objects[0] if all(key in one for one in objects)]
        gaps: dict[type, str] = {str: '"..."', list: "[...]", dict: "{...}"}
        shape = ", ".join(f"{json.dumps(key, ensure_ascii=False)}: {gaps.get(type(objects[0][key]), '...')}" for key in keys)
        prompt = f"Reply with a JSON object: {{{shape}}}" if keys else "Reply with a JSON object."
        return cls(keys, prompt)


def propose(path: str, *, model: str, question: str | None = None, answer: str | None = None) -> Proposal:
    """The first reading of the file that the pipeline accepts; `DataError` where there is none, or the file cannot be read.

    `model` is the one to be trained. `question` and `answer` are columns that the user has named; an empty answer: the task has
    no ground truth.
    """
    rows = preview(DataSource(path=path), PREVIEW_ROWS)
    columns = list(dict.fromkeys(str(column) for row in rows for column in row))
    found = candidates(rows, question=question, answer=answer)
    refused: dict[str, str] = {}
    with limited_templates(model):
        reader = Reader.of(model)
        for choice in found:
            texts = [str(row[choice.answer]) for row in rows if choice.answer and row.get(choice.answer) is not None]
            try:
                with tempfile.TemporaryDirectory() as folder:
                    made = _tried(reader, path, choice, find_pattern(texts) or find_unit(texts), rows, Path(folder))
                    return replace(made, left_out=left_out(made.choice, rows, refused))
            except _RefusedReading as error:
                refused[str(choice.question or choice.chat)] = str(error)
    others = left_out(ColumnChoice(None, None, None), rows, refused)
    raise DataError(
        "no column holds questions that can be used" + "".join(f"\n  {name}: {why}" for name, why in others),
        place=f"{path} (columns: {', '.join(columns)})",
        fix="name the columns: grpo init FILE --question COLUMN --answer COLUMN",
    )


class _RefusedReading(Exception):  # noqa: N818
    """The rules refuse most rows, as they are read."""


def data_settings(choice: ColumnChoice, columns: Sequence[str], pattern: str | None) -> dict[str, object]:
    """The settings of section `data` that describe a reading."""
    settings: dict[str, object] = {}
    if choice.template:
        settings["question"] = choice.template
    elif choice.question:
        settings["question_column"] = choice.question
    others = [name for name in ("prompt", "question") if name in columns and name != choice.question]
    if choice.chat and choice.reply:
        # Without its reply a chat is a prompt under one name: a column of this name that is a prompt would win.
        settings |= {"rename": {choice.chat: "messages"}} if choice.chat not in CHAT_COLUMNS else {}
        settings |= {f"{name}_column": f"no_{name}_column" for name in others if name in columns}
    elif choice.chat:
        settings["prompt_column"] = choice.chat
    elif not choice.template and "prompt" in (*others, choice.question):
        # A column called prompt would win over the question; this name is no column.
        settings["prompt_column"] = "no_prompt_column"
    settings["answer_column"] = "answer" if choice.reply_is_truth else choice.answer
    if pattern:
        settings["answer_pattern"] = pattern
    return settings


def _held_out(path: str) -> dict[str, str] | None:
    """The source of held-out rows that belongs to one of training rows: test.jsonl next to train.jsonl, or another split."""
    file = Path(path)
    for other in _HELD_OUT if "train" in file.stem else ():
        sibling = str(file.with_name(file.name.replace("train", other)))
        if Path(sibling).is_file() or (is_pattern(sibling) and glob.glob(sibling, recursive=True)):  # noqa: PTH207
            return {"path": sibling}
    if file.is_dir():
        train = [shard.path for shard in shards_of(DataSource(path=path))]
        for split in ("test", "validation"):
            with suppress(DataError):
                if not set(train) & {shard.path for shard in shards_of(DataSource(path=path, split=split))}:
                    return {"path": path, "split": split}
    return None


def _tried(
    reader: Reader,
    path: str,
    choice: ColumnChoice,
    pattern: tuple[str, str] | None,
    rows: Rows,
    folder: Path,
    system_prompt: str = SYSTEM_PROMPT,
) -> Proposal:
    """Validate the file with this reading; raises `_RefusedReading` when the rules refuse most rows."""
    columns = list(dict.fromkeys(str(column) for row in rows for column in row))
    held_out = _held_out(path)
    sources = {"train": [{"path": path, "max_rows": TRIAL_ROWS}]} | ({"eval": [held_out]} if held_out else {})
    settings = data_settings(choice, columns, pattern[0] if pattern else None)
    # The stage trains nothing here: a config has one.
    config = RunConfig(
        data=DataConfig.model_validate(sources | settings | {"system_prompt": system_prompt}),
        validation=ValidationConfig(max_prompt_length=reader.max_prompt_length),
        completion=CompletionConfig(equality="exact"),
        rollout=RolloutConfig(max_completion_length=reader.training.max_completion_length),
        stages=[StageConfig(name="train", rewards=["format"])],
        seed=42,
    )
    verdict = _accepted(config, reader, folder)
    # From all of the file, or the first of several tasks would decide for the others.
    known = verdict.accepted["answer"].drop_nulls()
    truths = known.gather_every(max(1, math.ceil(len(known) / PREVIEW_ROWS))).to_list()
    replied = (find_pattern(truths) or find_unit(truths)) if choice.reply_is_truth and pattern is None else None
    equality = find_equality(truths)
    objects = ObjectTruths.of(truths) if equality == "json" else None
    # Ground truths are rewritten with points, so completions have to have them.
    wanted = POINTS_PROMPT if any(one.used for one in verdict.commas) else SYSTEM_PROMPT
    wanted = objects.system_prompt if objects else wanted
    if replied or wanted != system_prompt:
        return _tried(reader, path, choice, replied or pattern, rows, folder, wanted)
    # The working in front of a ground truth shows how much of it a pretrained model needs.
    whole = [str(row[choice.answer]) for row in rows if choice.answer and row.get(choice.answer) is not None]
    written = whole if pattern and reader.training is PRETRAINED else truths
    return Proposal(
        reader=reader,
        train=path,
        eval=held_out,
        choice=choice,
        pattern=pattern[0] if pattern else None,
        pattern_meaning=pattern[1] if pattern else "",
        equality=equality,
        system_prompt=system_prompt,
        columns=columns,
        left_out=[],
        commas=verdict.commas,
        rows=verdict.rows,
        refused=verdict.num_quarantined,
        reasons=[f"{rule.rows:,} x {rule.meaning}" for rule in verdict.rules if rule.rows],
        max_prompt_length=min(reader.max_prompt_length, 32 * math.ceil(verdict.prompt_tokens.max / 32)),
        objects=objects,
        answer_tokens=max(reader.counter.count([[{"role": "user", "content": text}] for text in written]), default=0),
    )


def _accepted(config: RunConfig, reader: Reader, folder: Path) -> RowVerdict:
    """The verdict about rows that are read in this way; raises `_RefusedReading`, or `DataError` where none could be right."""
    load_sources(config.data, directory=folder)
    counter = reader.counter
    verdict = judge(pl.read_parquet(folder / ROWS), config=config, counter=counter, markers=counter.special_tokens)
    broken = [rule for rule in verdict.rules if rule.rows]
    if any(rule.rule == "media_with_text" for rule in broken):
        # Another column is no way out: the text next to an image is not the whole question.
        first = verdict.quarantine.filter(rule="media_with_text").row(0, named=True)
        raise DataError(
            f"rows have an image, a sound or a video next to their text ({first['value']}); only text is trained on",
            place=row_place(first["source"], first["line"]),
            fix="remove the column; where the text is complete without it, write it to a file of its own",
        )
    if verdict.num_quarantined > MOST_REFUSED * verdict.rows:
        worst = max(broken, key=lambda rule: rule.rows)
        raise _RefusedReading(f"{verdict.num_quarantined:,} of {verdict.rows:,} rows are refused: {worst.meaning}")
    return verdict


def find_unit(answers: Sequence[str]) -> tuple[str, str] | None:
    """The pattern that takes numbers out of answers of one unit. Those of several units cannot be compared without it."""
    found = pl.Series("answer", answers, dtype=pl.String).str.extract_groups(_WITH_UNIT).struct
    before, after = (set(found.field(side).drop_nulls()) - {""} for side in ("1", "3"))
    if not answers or found.field("2").null_count() or len(before) + len(after) != 1:
        return None
    [unit] = before | after
    mark = f"(?:{re.escape(unit)})?"
    pattern = rf"^\s*{mark}\s*(.*?)\s*$" if before else rf"^\s*(.*?)\s*{mark}\s*$"
    return pattern, f"the number without its unit {unit}"


def find_equality(truths: Sequence[str]) -> Equality:
    """How these ground truths are compared: as objects, letters, numbers or expressions if all of them are such, else as text."""
    if truths and all(_is_object(truth) for truth in truths):
        return "json"
    rows = pl.DataFrame({"answer": truths}, schema={"answer": pl.String}).with_row_index("line")
    rows = rows.with_columns(answer=normalise_column(pl.col("answer")), source=pl.lit(""))
    short = bool((rows["answer"].str.len_chars() <= _LONGEST_CHOICE).all())
    kinds: list[Equality] = ["numeric", "choice", "math"] if short else ["numeric", "math"]
    for kind in kinds:
        if truths and find_unusable_truths(rows, kind).count == 0:
            return kind
    return "exact"


def _is_object(text: str) -> bool:
    if not text.lstrip().startswith("{"):
        return False
    try:
        return isinstance(json.loads(text), dict)
    except (ValueError, RecursionError):
        return False


def config_text(proposal: Proposal, *, name: str, config_path: str) -> str:
    """The proposal as YAML, checked before it is returned: what is written can be loaded. Its first lines name `config_path`."""
    reasons = "".join(f"\n  # {_comment(reason)}" for reason in proposal.reasons)
    completion = ""
    if proposal.objects:
        keys = proposal.objects.keys
        required = f"\n  required: {json.dumps(keys, ensure_ascii=False)}    # all ground truths have these keys"
        completion = f"""
completion:
  format: json    # a completion is one JSON object{required if keys else ""}
  equality: json    # right: the same keys and values as in the ground truth, whatever their order
"""
    elif proposal.has_truth:
        completion = f"\ncompletion:\n  equality: {proposal.equality}    # exact | numeric | math | choice\n"
    reader, training = proposal.reader, proposal.reader.training
    counted = f"\n  # {_comment(reader.note)}" if reader.note else ""
    # The embedded model was made for float32: another precision would show other results than the pages.
    faster = "  dtype: auto    # bfloat16 where this machine is faster in it, else float32\n"
    dtype = "" if training is TINY else faster
    text = f"""\
# Written by grpo init. Paths are relative to the folder where you call grpo.
#   grpo validate {config_path}    checks every row
#   grpo rewards {config_path}     tests the rewards, without any training
#   grpo run {config_path}         trains, evaluates and registers the model
# grpo fields WORD explains every setting.

name: {_scalar(name)}    # folder below runs/, MLflow experiment and registered model
seed: 42

model:
  path: {_scalar(reader.path)}    # a folder, a hub id such as Qwen/Qwen2.5-0.5B-Instruct, or a registered model NAME@champion;
                            # embedded:base is a tiny model that runs anywhere and knows only small sums
{_model_notes(reader)}{dtype}  lora: {{r: 16, lora_alpha: 32}}    # null: train every weight

{_data(proposal)}
validation:
  max_prompt_length: {proposal.max_prompt_length}    # tokens; longer prompts are quarantined, never cut{counted}
  max_invalid_fraction: {proposal.max_invalid_fraction}    # {proposal.refused:,} of {proposal.rows:,} rows of this file are \
refused; more stop the run{reasons}
{completion}
rollout:
  max_completion_length: {proposal.max_completion_length}    # tokens
  temperature: 1.0
{_thinking(reader)}
{_stages(proposal)}
evaluation: {{max_prompts: {training.eval_prompts}, num_samples: 4}}
"""
    check_config(parse_yaml(text, place=config_path), place=config_path)
    return text


def _model_notes(reader: Reader) -> str:
    """Comments about a model that its name says something about."""
    hints, notes = NameHints.of(reader.path), ""
    if hints.preset:
        notes += f"  # the nearest preset: grpo presets {hints.preset}\n"
    if hints.recurrent:
        notes += "  # on a GPU install flash-linear-attention and causal-conv1d: its recurrent layers are much slower without\n"
    return notes


def _thinking(reader: Reader) -> str:
    """The setting that turns thinking off, where the template has one. Where it is not here, the model's name decides."""
    by_name = bool(reader.note)
    known = "enable_thinking" in template_variables(reader.counter.tokenizer)
    if not (NameHints.of(reader.path).can_think if by_name else known):
        return ""
    why = "its family can think; " if by_name else ""
    return f"  chat_template_kwargs: {{enable_thinking: false}}    # {why}true: it thinks first, in tokens of the completion\n"


def _data(proposal: Proposal) -> str:
    lines = ["data:", f"  train: [{{path: {_scalar(proposal.train)}}}]"]
    if proposal.eval:
        listed = ", ".join(f"{key}: {_scalar(value)}" for key, value in proposal.eval.items())
        lines.append(f"  eval: [{{{listed}}}]    # held-out rows")
    else:
        lines.append("  eval_fraction: 0.1    # share of the rows that is held out for evaluation")
    lines.append(f"  # columns of the file: {_comment(', '.join(proposal.columns))}")
    lines += [f"  #   {_comment(f'{name} is left out: {why}')}" for name, why in proposal.left_out]
    lines += [f"  # {_comment(str(one))}" for one in proposal.commas]
    for key, value in data_settings(proposal.choice, proposal.columns, proposal.pattern).items():
        meaning = proposal.pattern_meaning if key == "answer_pattern" else _MEANINGS[key]
        if key == "answer_column" and value is None:
            meaning = "the file has no ground truth"
        if value in ("no_prompt_column", "no_question_column"):
            meaning = f"the column `{key.removesuffix('_column')}` is not used"
        if key == "answer_column" and proposal.choice.reply_is_truth:
            meaning = "the last reply of the chat is the ground truth"
        lines.append(f"  {key}: {_scalar(value)}    # {_comment(meaning)}")
    says = "what section completion asks for" if proposal.objects else "names the tags of section completion"
    lines.append(f"  system_prompt: {_scalar(proposal.system_prompt)}    # {says}")
    return "\n".join(lines) + "\n"


def _stages(proposal: Proposal) -> str:
    training = proposal.reader.training
    accumulated = training.gradient_accumulation_steps
    more = f"    gradient_accumulation_steps: {accumulated}    # passes per update\n" if accumulated > 1 else ""
    own = "    # add your own: rewards.functions.NAME.function: 'module:function'"
    stages = f"""\
stages:
  - &stage
    name: format    # first learn {"to write such an object" if proposal.objects else "the tags"} ...
    rewards: [{"" if proposal.objects else "incremental_format, "}format]{"" if proposal.has_truth else own}
    max_steps: {training.max_steps[0]}
    num_generations: 8    # completions per prompt
    per_device_train_batch_size: {training.per_device_train_batch_size}    # completions per pass
{more}    learning_rate: {training.learning_rate}
    beta: {training.beta}    # strength of the KL penalty
"""
    if proposal.has_truth:
        stages += f"""\
  - <<: *stage
    name: correctness    # ... then right answers, from the model of the first stage
    rewards: [format, correctness]    # correctness compares with the ground truth
    max_steps: {training.max_steps[1]}
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
    return line if len(line) <= 400 else line[:399] + "…"
