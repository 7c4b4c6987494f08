"""How the rules of rules.py are checked: expressions over one row, judged by one pandera schema, and comparisons between rows.

    rows --add_views--> --broken_row_rules--> row, rule, value
         --relation_keys--> --find_duplicates, find_contradictions--> row, rule, value

A row expression is True where the rule holds. A missing prompt or answer breaks no rule about its content: the reason why it is
missing has been recorded already.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import pandera.errors
import pandera.polars as pa
import polars as pl

from grpo_tasks.data.leaks import asked_text, normalise_question
from grpo_tasks.data.normalise import SHOWN, normalise_column
from grpo_tasks.data.rules import RULES, Scope
from schemas.config.completion import TagsConfig
from schemas.config.data import PromptFormat
from schemas.prompts import PLAIN

ROLES = ["system", "user", "assistant"]
GENERIC_MARKERS = (
    "<|im_start|>", "<|im_end|>", "<|endoftext|>", "<|begin_of_text|>", "<|end_of_text|>", "<|start_header_id|>",
    "<|end_header_id|>", "<|eot_id|>", "<|system|>", "<|user|>", "<|assistant|>", "<|end|>", "<|end_of_turn|>", "<start_of_turn>",
    "<end_of_turn>", "[INST]", "[/INST]", "<<SYS>>", "<</SYS>>", "<｜User｜>", "<｜Assistant｜>",
)  # fmt: skip
"""Template markers of well-known chat models; a prompt must contain none of them, whichever model is trained."""
_CONTROL = r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f\u0080-\u0084\u0086-\u009f]"
_TASK_NAME = "^[A-Za-z0-9][A-Za-z0-9_.-]{0,63}$"
_MAX_VALUE = 200
_MAX_CONTRADICTION = 400
_SHOWN_PROMPT = 80
_SHOWN_ANSWER = 30

_ROLES = pl.col("prompt").list.eval(pl.element().struct.field("role"))
_CONTENTS = pl.col("prompt").list.eval(pl.element().struct.field("content"))
_USER_TEXT = (
    pl.col("prompt")
    .list.eval(pl.element().filter(pl.element().struct.field("role").is_in(["user", PLAIN])).struct.field("content"))
    .list.join("\n")
)


@dataclass(frozen=True, slots=True)
class RowRule:
    """How one rule about a single row is checked."""

    rule: str
    holds: pl.Expr
    """True where the row keeps it; null counts as kept."""
    value: pl.Expr
    """What the quarantine shows of a row that breaks it; a string."""


def row_rules(tags: TagsConfig, markers: Sequence[str], form: PromptFormat = "conversational") -> list[RowRule]:
    """The rules about a single row, over the columns of `add_views`.

    `markers` are the tokenizer's own special tokens; they are forbidden in addition to GENERIC_MARKERS. A prompt in the standard
    format has no turns, and may contain markers: no template adds any.
    """
    own_tags = tags.in_order
    forbidden = [marker for marker in dict.fromkeys((*GENERIC_MARKERS, *markers)) if marker and marker not in own_tags]
    mixed = RowRule("mixed_forms", ~pl.col("other_form"), pl.lit("chat messages" if form == "standard" else "a string"))
    task = pl.col("task")
    named = RowRule("task_name", pl.col("faulty_line") | (task.is_not_null() & task.str.contains(_TASK_NAME + "|^$")), task)
    turns = [] if form == "standard" else _turn_rules()
    return [mixed, *turns, *_content_rules(tags.answer, forbidden, form), *_answer_rules(own_tags), named]


def add_views(rows: pl.DataFrame) -> pl.DataFrame:
    """`rows` of `normalise.add_prompts` with the columns that the rules examine.

    roles: all roles, joined by commas. text: all contents, joined by line breaks. truths: all answers, joined by line breaks.
    faulty_line, faulty_answer: whether reading found a fault that leaves no line or no answer.
    """
    return rows.with_columns(
        roles=_ROLES.list.join(","),
        text=_CONTENTS.list.join("\n"),
        truths=pl.coalesce(pl.col("answers").list.join("\n"), "answer"),
        faulty_line=_has_fault("line"),
        faulty_answer=_has_fault("answer"),
    )


def broken_row_rules(rows: pl.DataFrame, rules: Sequence[RowRule]) -> pl.DataFrame:
    """Columns row, rule, value: one line for each rule that a row breaks; `rows` needs a column `row`."""
    held = rows.select(rule.holds.fill_null(value=True).alias(rule.rule) for rule in rules)
    schema = pa.DataFrameSchema({rule.rule: pa.Column(bool, pa.Check.eq(True)) for rule in rules})
    try:
        schema.validate(held, lazy=True)
    except pandera.errors.SchemaErrors as errors:
        cases = errors.failure_cases.select(pl.col("column").alias("rule"), pl.col("index").cast(pl.UInt32))
        return pl.concat(_found_values(rows, rule, cases.filter(pl.col("rule") == rule.rule)["index"]) for rule in rules)
    return _found_values(rows, rules[0], pl.Series([], dtype=pl.UInt32))


def relation_keys(rows: pl.DataFrame) -> pl.DataFrame:
    """Three hashes per prompt: of all messages, of all but the system message, and of the latter normalised.

    Rows are compared by 64-bit hashes instead of texts: a million rows take a fraction of a second, and the chance of a false
    match among them is about 3 in 10^8. `rows` has the column prompt and those of `add_views`.
    """
    texts = rows.select(chat=pl.struct("roles", "text"), question=asked_text(), has_prompt=pl.col("prompt").is_not_null())
    keys = {
        "prompt_key": pl.col("chat"),
        "question_key": pl.col("question"),
        "normalised_key": normalise_question(pl.col("question")),
    }
    return texts.select(pl.when("has_prompt").then(text.hash()).alias(key) for key, text in keys.items())


def find_duplicates(keys: pl.DataFrame) -> pl.DataFrame:
    """Rows that repeat an earlier row of their split: columns row, rule, value.

    `keys`: row, split, source, line, prompt, prompt_id, answer, answers, task and the keys of `relation_keys`, in reading order,
    only rows with a prompt_id. Called before the pipeline's own split, which would separate copies.
    """
    shared = _with_shared(keys, "prompt_id")
    first = pl.concat_str(pl.col("source").first(), pl.lit(":"), pl.col("line").first()).over("split", "prompt_id")
    later = shared.with_columns(first=first).filter(~pl.col("prompt_id").is_first_distinct().over("split"))
    return later.select("row", rule=pl.lit("duplicate"), value=pl.concat_str(pl.lit("same as "), "first"))


def find_contradictions(keys: pl.DataFrame) -> pl.DataFrame:
    """Rows of one split with the same prompt and different answers, arguments as for `find_duplicates`.

    The value shows the prompt, and each answer with its row.
    """
    same_prompt = ["split", "prompt_key", "task"]
    conflicting = _with_shared(keys, "prompt_key").filter(pl.col("prompt_id").n_unique().over(same_prompt) > 1)
    asked = pl.col("prompt").list.last().struct.field("content")
    prompt = pl.when(asked.str.len_chars() > _SHOWN_PROMPT).then(asked.str.head(_SHOWN_PROMPT - 1) + "…").otherwise(asked)
    answer = pl.coalesce(pl.col("answers").list.join(" or "), "answer").fill_null("no answer").str.head(_SHOWN_ANSWER)
    place = pl.concat_str(answer, pl.lit(" ("), "source", pl.lit(":"), "line", pl.lit(")"))
    shown = conflicting.with_columns(prompt=prompt.str.replace_all(r"\s+", " "), shown=place)
    # One row for each answer: the copies of a row say nothing new.
    each = pl.col("shown").filter(pl.col("prompt_id").is_first_distinct()).head(4).str.join(" | ").over(same_prompt)
    value = pl.concat_str("prompt", pl.lit(": "), each).str.head(_MAX_CONTRADICTION)
    return shown.select("row", rule=pl.lit("contradiction"), value=value)


def _found_values(rows: pl.DataFrame, rule: RowRule, indices: pl.Series) -> pl.DataFrame:
    value = rule.value.cast(pl.String).fill_null("null")
    shortened = pl.when(value.str.len_chars() > _MAX_VALUE).then(value.str.head(_MAX_VALUE - 1) + "…").otherwise(value)
    return rows[indices].select("row", rule=pl.lit(rule.rule), value=shortened)


def _has_fault(scope: Scope) -> pl.Expr:
    # An ignorable fault, such as a duplicate key, leaves a row that can be read.
    names = [rule.name for rule in RULES if rule.scope == scope and not rule.ignorable]
    return pl.col("faults").list.eval(pl.element().struct.field("rule").is_in(names)).list.any().fill_null(value=False)


def _turn_rules() -> list[RowRule]:
    roles = pl.col("roles")
    known = ~_ROLES.list.eval(~pl.element().is_in(ROLES)).list.any()
    turns = roles.str.replace_all("system,", "", literal=True).str.replace(",?system$", "")
    alternate = turns.str.contains("^(user(,assistant,user)*(,assistant)?)?$")
    # With an unknown role the order of turns is undefined, and only unknown_role is reported.
    return [
        RowRule("unknown_role", known, roles),
        RowRule("system_position", ~known | ~_ROLES.list.slice(1).list.contains("system"), roles),
        RowRule("turn_order", ~known | alternate, roles),
        RowRule("last_not_user", ~known | (_ROLES.list.last() == "user"), roles),
    ]


def _content_rules(answer_tag: str, markers: list[str], form: PromptFormat) -> list[RowRule]:
    text, answer = pl.col("text"), pl.col("truths").fill_null("")
    filled = _CONTENTS.list.eval(pl.element().str.contains(SHOWN)).list.all()
    both = pl.concat_str(text, answer, separator="\n")
    marked = both if form == "conversational" else answer
    block = rf"(?s)<{answer_tag}>.*?</{answer_tag}>"
    given = _USER_TEXT.str.extract_all(block).list.eval(
        normalise_column(pl.element().str.strip_prefix(f"<{answer_tag}>").str.strip_suffix(f"</{answer_tag}>"))
    )
    # Few prompts contain an answer block; the search for the literal tag keeps the regex from all the others.
    has_block = text.str.contains(f"<{answer_tag}>", literal=True)
    tells = given.list.set_intersection(pl.coalesce("answers", pl.concat_list("answer"))).list.len() > 0
    around = both.str.extract(f"(?s)(.{{0,20}}{_CONTROL}.{{0,20}})", 1)
    return [
        RowRule("content_empty", filled, pl.col("roles")),
        # As JSON, which escapes invisible characters.
        RowRule("control_characters", ~both.str.contains(_CONTROL), pl.struct(found=around).struct.json_encode()),
        RowRule(
            "template_markers",
            ~marked.str.contains_any(markers),
            marked.str.extract_many(markers).list.unique(maintain_order=True).list.join(" "),
        ),
        RowRule("answer_in_prompt", ~has_block | ~tells | (answer == ""), given.list.join(" | ")),
    ]


def _answer_rules(own_tags: list[str]) -> list[RowRule]:
    answer, pattern_found = pl.col("answer"), pl.col("pattern_found")
    already_reported = pl.col("faulty_line") | pl.col("faulty_answer")
    present = pattern_found.is_not_null() & answer.str.contains(SHOWN).fill_null(value=True)
    return [
        RowRule("answer_missing", already_reported | present | ~pl.col("needs_answer"), answer),
        RowRule("answer_pattern", already_reported | pattern_found, pl.col("raw_answer")),
        RowRule("answer_has_tags", ~pl.col("truths").str.contains_any(own_tags), pl.col("truths")),
    ]


def _with_shared(keys: pl.DataFrame, key: str) -> pl.DataFrame:
    """The few rows that share their key with another row; only these need the costly comparison."""
    return keys.filter(pl.col(key).is_duplicated())
