"""What a run does, or the user can do, about a tokenizer or chat template that is not as most are: for log and report."""

import re

import polars as pl
from transformers import PreTrainedTokenizerBase

from grpo_tasks.content.model_files import asks_for_date, generation_eos
from grpo_tasks.content.tokenizer import QUESTION, RefusedError, answered, rendered, surroundings, turn_end
from grpo_tasks.data.judge import RowVerdict
from schemas.config.model import ModelConfig
from schemas.config.rollout import TEMPLATE_DATE, RolloutConfig
from schemas.errors import ConfigError
from schemas.paths import resolve

_MONTH = "(?:Jan|Feb|Mar|Apr|May|Jun|Jul|Aug|Sep|Oct|Nov|Dec)[a-z]*"
_A_DATE = re.compile(
    rf"\b(?:\d{{4}}-\d\d-\d\d|\d\d?[./-]\d\d?[./-]\d{{4}}|\d\d?\.? {_MONTH} \d{{4}}|{_MONTH} \d\d?(?:st|nd|rd|th)?,? \d{{4}})\b"
)


def check_system_prompt(tokenizer: PreTrainedTokenizerBase, system_prompt: str | None) -> None:
    """Raise `ConfigError` with the chat template's own message where it does not take the system prompt."""
    if system_prompt is None or not tokenizer.chat_template:
        return
    try:
        rendered(tokenizer, [QUESTION], opened=True)
    except RefusedError:
        return  # Whatever this template wants, it is not about the system prompt.
    try:
        rendered(tokenizer, [{"role": "system", "content": system_prompt}, QUESTION], opened=True)
    except RefusedError as error:
        raise ConfigError(
            f"{error}",
            place="data.system_prompt",
            fix="remove data.system_prompt and write it into the question: data.question: 'INSTRUCTION {question}'",
        ) from error


def tokenizer_notes(
    tokenizer: PreTrainedTokenizerBase, verdict: RowVerdict, model: ModelConfig, rollout: RolloutConfig
) -> list[str]:
    """The sentences about the tokenizer of a run, which is prepared with its settings."""
    if verdict.format == "standard":
        return [*_added_to_texts(tokenizer, verdict), *_ends(tokenizer, model, rollout, plain=True)]
    notes = [*_without_bos(tokenizer), *_unopened(tokenizer), *_date(tokenizer, model, rollout)]
    return [*notes, *_ends(tokenizer, model, rollout, plain=False)]


def _added_to_texts(tokenizer: PreTrainedTokenizerBase, verdict: RowVerdict) -> list[str]:
    before, behind = (tokenizer.decode(ids) for ids in surroundings(tokenizer))
    notes = []
    first = pl.col("prompt").list.first().struct.field("content")
    twice = verdict.accepted.filter(first.str.starts_with(before)).height if before else 0
    if twice:
        notes.append(f"{twice:,} prompts begin with {before}, which the tokenizer writes before any text: they have it once")
    if behind:
        notes.append(
            f"the tokenizer writes {behind} behind any text; prompts have none: a model that has read it begins another text"
        )
    return notes


def _without_bos(tokenizer: PreTrainedTokenizerBase) -> list[str]:
    before, _ = surroundings(tokenizer)
    around = answered(tokenizer)
    if not before or around is None:
        return []
    first = tokenizer(around[0], add_special_tokens=False)["input_ids"][: len(before)]
    if first == before:
        return []
    return [
        f"the tokenizer begins a text with {tokenizer.decode(before)}, the chat template does not: chats go without it, as "
        "transformers' apply_chat_template encodes them"
    ]


def _unopened(tokenizer: PreTrainedTokenizerBase) -> list[str]:
    # The template writes an opening before the assistant's words, and writes none when it is asked for one.
    around = answered(tokenizer)
    if around is None:
        return []
    opened, ended = (rendered(tokenizer, [QUESTION], opened=opened) for opened in (True, False))
    missing = around[0].removeprefix(ended)
    if opened != ended or not missing.strip():
        return []
    return [
        f"the chat template has no generation prompt: a prompt ends before {missing.strip()!r}, which the model has to write "
        "itself; fix: add {% if add_generation_prompt %} to the template"
    ]


def _date(tokenizer: PreTrainedTokenizerBase, model: ModelConfig, rollout: RolloutConfig) -> list[str]:
    # The present day would be another one tomorrow, and any other one gets old.
    try:
        found = _A_DATE.search(rendered(tokenizer, [QUESTION], opened=True))
    except RefusedError:
        return []
    if found is None:
        return []
    day = rollout.chat_template_kwargs.get(TEMPLATE_DATE)
    if day is None and asks_for_date(resolve(model.path), model.revision):
        return [
            f"the chat template writes the day on which it is rendered ({found[0]}): tomorrow's prompts are other prompts; "
            "fix: rollout.chat_template_kwargs: {strftime_now: '2026-11-26'}"
        ]
    kept = (
        f"the day that the runs in this folder began, or strftime_now: {day}" if day else "a variable or a text of the template"
    )
    return [f"the chat template writes a date into every prompt: {found[0]} ({kept}); the merged model's template keeps it"]


def _ends(tokenizer: PreTrainedTokenizerBase, model: ModelConfig, rollout: RolloutConfig, *, plain: bool) -> list[str]:
    eos = generation_eos(resolve(model.path), model.revision)
    named = {tokenizer.eos_token_id, *(eos if isinstance(eos, list) else [eos])} - {None}
    end = turn_end(tokenizer)
    if end is not None and tokenizer.convert_tokens_to_ids(end) not in named:
        return [
            f"the chat template ends a turn with {end}, which is neither the tokenizer's EOS nor in the generation config: it "
            "ends completions here, and the merged model's generation config names it"
        ]
    if rollout.stop or rollout.stop_token_ids or end is not None:
        return []
    fix = "fix: rollout.stop or rollout.stop_token_ids"
    if not named:
        return [f"nothing ends a completion but its length: there is no EOS token, and no template that ends a turn; {fix}"]
    around = answered(tokenizer)
    if plain or around is None:
        return []
    return [
        f"the chat template ends a turn with {around[1]!r} and no end token: completions end at {tokenizer.eos_token or named}, "
        f"which this template never writes; {fix}"
    ]
