"""`grpo init`: writes a config for a data file, after at most five questions."""

import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from flows.cli.environment import prepare_environment, report_errors
from flows.cli.show import say, tell
from schemas.errors import UserError

if TYPE_CHECKING:
    from grpo_tasks.data.proposal import Proposal

_COMMON_STEMS = ("train", "test", "data", "dataset", "rows", "examples", "questions")
_REPLY = "the last reply"
_MARKS = re.compile(r"[-_](?:train|test|data)|(?:train|test|data)[-_]")


def init(
    file: Annotated[
        str | None,
        typer.Argument(
            metavar="FILE", help="A data file, a folder of them or a pattern. Without it, the only file of the current folder."
        ),
    ] = None,
    into: Annotated[Path | None, typer.Option("--out", metavar="CONFIG", help="Config to write. Default: NAME.yaml.")] = None,
    question: Annotated[str | None, typer.Option(help="Column with the question, or with chat messages.")] = None,
    answer: Annotated[str | None, typer.Option(help="Column with the ground truth; an empty text if there is none.")] = None,
    model: Annotated[str, typer.Option(help="Base model: a folder, a hub id or a registered model.")] = "embedded:base",
    yes: Annotated[bool, typer.Option("--yes", help="Ask nothing; take what the file suggests.")] = False,
    force: Annotated[bool, typer.Option("--force", help="Overwrite the config if it exists.")] = False,
) -> None:
    """Write a config for a data file: columns, answers, rewards and limits as the file suggests them."""
    with report_errors():
        from grpo_tasks.content.shards import FORMATS, format_of

        found_here = sorted(path.name for path in Path.cwd().iterdir() if format_of(path) and path.is_file())
        if file is None and not found_here:
            raise UserError("there is no data file in this folder", fix=f"name one: grpo init FILE ({', '.join(FORMATS)})")
        if file is None and len(found_here) > 1:
            names = ", ".join(found_here[:8])
            fix = f"name one: grpo init {found_here[0]}"
            raise UserError(f"this folder has {len(found_here)} data files: {names}", fix=fix)
        source = file or found_here[0]
        typer.echo(f"reading {source}", err=True)
        target = into or Path(f"{run_name(source)}.yaml")
        if target.exists() and not force:
            raise UserError("the config exists already", place=str(target), fix="name another one with --out, or add --force")
        prepare_environment()
        from flows.model_names import is_registered_name
        from flows.preflight import check_model
        from grpo_tasks.data.proposal import config_text, propose

        ask = _ask if not yes and _can_answer() else None
        if ask is not None:
            # First, because its tokenizer counts the tokens of the rows.
            model = ask("Base model (folder, hub id or registered model)", model)
        if not is_registered_name(model):
            check_model(model, "--model")
        found = propose(source, model=model, question=question, answer=answer)
        if ask is not None:
            found = _confirmed(found, ask)
        text = config_text(found, name=run_name(source), config_path=str(target))
        target.write_text(text, encoding="utf-8")
        _show(found, target)


def run_name(source: str) -> str:
    """A name for the run: that of the file, or of its folder where the file has a name like train.jsonl."""
    path = Path(source)
    # Two suffixes: rows.jsonl.gz. A pattern such as parts/*.parquet has no name of its own.
    stem = path.name.removesuffix("".join(path.suffixes[-2:])) or path.stem
    stem = _MARKS.sub("", stem) or stem
    if stem.lower() in _COMMON_STEMS or "*" in stem:
        stem = path.resolve().parent.name or stem
    plain = re.sub(r"[^A-Za-z0-9_.-]+", "-", stem).strip("-.")[:60]
    return plain if plain[:1].isalpha() else f"grpo-{plain}".rstrip("-")


def _can_answer() -> bool:
    return sys.stdin.isatty()


def _ask(question: str, proposed: str) -> str:
    return str(typer.prompt(question, default=proposed, show_default=True)).strip()


def _confirmed(found: "Proposal", ask: Callable[[str, str], str]) -> "Proposal":
    """The proposal as the user wants it. Three questions at most; a fourth where a pattern was found."""
    from dataclasses import replace

    from grpo_tasks.data.proposal import propose

    tell(f"columns: {', '.join(found.columns)}")
    choice = found.choice
    column = ask("Column with the question or the chat", str(choice.chat or choice.question))
    proposed = _REPLY if choice.reply_is_truth else choice.answer or "-"
    truth = ask("Column with the ground truth (- for none)", proposed)
    if (column, truth) != (choice.chat or choice.question, proposed):
        named = None if truth == _REPLY else "" if truth == "-" else truth
        found = propose(found.train, model=found.reader.path, question=column, answer=named)
    if found.pattern:
        kept = ask(f"Ground truth inside the answer: {found.pattern_meaning} (- for the whole answer)", found.pattern)
        found = replace(found, pattern=None if kept == "-" else kept, pattern_meaning="as you typed it")
    # Objects have a format of their own, which the system prompt names.
    if found.has_truth and not found.objects:
        equality = ask("Answers are compared as exact, numeric, math or choice", found.equality)
        found = replace(found, equality=equality)  # type: ignore[arg-type]  # the config is checked before it is written
    return found


def _show(found: "Proposal", target: Path) -> None:
    choice = found.choice
    prompt = f"chat {choice.chat}" if choice.chat else f"question {choice.question}"
    context = f" with {', '.join(name.rstrip('?') for name in choice.context)}" if choice.context else ""
    truth = _REPLY if choice.reply_is_truth else choice.answer or "none"
    tell(f"{found.rows:,} rows; {prompt}{context}; ground truth {truth}")
    for reason in found.reasons:
        tell(f"  refused: {reason}")
    for name, why in found.left_out:
        tell(f"  left out: {name} ({why})")
    for one in found.commas:
        tell(f"  {one}")
    if found.reader.note:
        tell(f"  lengths are {found.reader.note}")
    say(f"written: {target}")
    for command in ("validate", "rewards", "run"):
        say(f"  grpo {command} {target}")
