"""What a row must keep beside the others: no duplicates, no contradictions, nothing that is also held out.

Works on keys, not on texts: 64-bit hashes of prompts and questions, so that a million rows are compared in a fraction of a
second (the chance of a false hit among a million rows is about 3 in 10^8).
"""

import polars as pl

from grpo_tasks.data.normalise import INVISIBLE

_LOOK_ALIKES = {"‘": "'", "’": "'", "“": '"', "”": '"', "…": "...", **dict.fromkeys(INVISIBLE, "")}
_KEYS = ("prompt_key", "question_key", "plain_key")


def relation_keys(rows: pl.DataFrame) -> pl.DataFrame:
    """Three hashes of each prompt: of all messages, of all but the system's, and of the latter without case and punctuation.

    `rows` holds prompt and the views of `row_rules.with_views`.
    """
    asked = pl.col("prompt").list.eval(pl.element().filter(pl.element().struct.field("role") != "system").struct.field("content"))
    keys = rows.select(whole=pl.struct("roles", "text"), asked=asked.list.join("\n"), known=pl.col("prompt").is_not_null())
    hashed = keys.select(
        "known", prompt_key=pl.col("whole").hash(), question_key=pl.col("asked").hash(), plain_key=plain(pl.col("asked")).hash()
    )
    return hashed.select(pl.when("known").then(pl.col(key)).alias(key) for key in _KEYS)


def plain(text: pl.Expr) -> pl.Expr:
    """A question without case, repeated blanks and the punctuation of sentences; operators and numbers stay as they are."""
    # Only punctuation at the edge of a word goes: 1.5 is not 15, and 3 - 4 is not 3 / 4.
    return (
        text.str.to_lowercase()
        .str.replace_many(_LOOK_ALIKES)
        .str.replace_all(r"[.,;:?'\"]+(?:\s|$)", " ")
        .str.replace_all(r"(?:^|\s)['\"]+", " ")
        .str.replace_all(r"\s\s+|[^\S ]", " ")
        .str.strip_chars()
    )


def broken_copies(marks: pl.DataFrame) -> pl.DataFrame:
    """Duplicates and contradictions inside a side: columns row, rule, value, as `row_rules.broken_rules`.

    `marks`: row, side, source, line, prompt_id, answer, the keys of `relation_keys`, in reading order, all whole rows.
    Called before any split of ours, which would tear copies apart.
    """
    return pl.concat([_duplicates(marks), _contradictions(marks)])


def broken_separation(marks: pl.DataFrame) -> pl.DataFrame:
    """Training rows whose question is held out as well, after the split; arguments and columns as `broken_copies`."""
    train, held = marks.filter(side="train"), marks.filter(side="eval")
    exact = _leak(train, held, "question_key", "leak_exact")
    rest = train.join(exact, on="row", how="anti")
    return pl.concat([exact, _leak(rest, held, "plain_key", "leak_normalised")])


def _duplicates(marks: pl.DataFrame) -> pl.DataFrame:
    several = _several(marks, "prompt_id")
    first = pl.concat_str(pl.col("source").first(), pl.lit(":"), pl.col("line").first()).over("side", "prompt_id")
    later = several.with_columns(first=first).filter(~pl.col("prompt_id").is_first_distinct().over("side"))
    return later.select("row", rule=pl.lit("duplicate"), value=pl.concat_str(pl.lit("same as "), "first"))


def _contradictions(marks: pl.DataFrame) -> pl.DataFrame:
    same = ["side", "prompt_key"]
    torn = _several(marks, "prompt_key").filter(pl.col("prompt_id").n_unique().over(same) > 1)
    answers = pl.col("answer").unique(maintain_order=True).head(5).str.head(30).str.join(" | ").over(same)
    return torn.select("row", rule=pl.lit("contradiction"), value=answers)


def _several(marks: pl.DataFrame, key: str) -> pl.DataFrame:
    """The few rows that share their key with another one; only these are looked at closely."""
    return marks.filter(pl.col(key).is_duplicated())


def _leak(train: pl.DataFrame, held: pl.DataFrame, key: str, rule: str) -> pl.DataFrame:
    places = held.unique(key, keep="first", maintain_order=True).select(key, held="source", held_line="line")
    found = train.join(places, on=key, how="inner", maintain_order="left")
    return found.select("row", rule=pl.lit(rule), value=pl.concat_str(pl.lit("held out at "), "held", pl.lit(":"), "held_line"))
