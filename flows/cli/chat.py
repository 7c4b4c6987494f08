"""Ask a model questions in the terminal."""

import os
from pathlib import Path

from rich.console import Console

from flows.model_names import registered_model
from flows.preflight import check_model
from grpo_tasks.content.limited_model import check_model_files
from grpo_tasks.rollout.chat_session import ChatSession, ChatSettings
from grpo_tasks.tracking.models import ORIGIN
from grpo_tasks.tracking.registry import lineage_of
from schemas.config.operations import TrackingConfig
from schemas.paths import resolve
from schemas.results.publication import Lineage

DOWNLOADS = Path("runs") / "downloads"


def answer_questions(
    console: Console, model: str, question: str | None, *, system: str | None, settings: ChatSettings, tracking: TrackingConfig
) -> None:
    """Answer `question`; without one, answer what the user types until an empty line or Ctrl-D."""
    folder, prompt = _model(model, tracking)
    system = prompt if system is None else system
    chat = ChatSession(folder)
    before = [{"role": "system", "content": system}] if system else []
    while (text := question or _read(console)) is not None:
        for piece in chat.answer([*before, {"role": "user", "content": text}], settings):
            console.print(piece, end="", markup=False, highlight=False, soft_wrap=True)
        console.print()
        if question:
            return


def _model(name: str, tracking: TrackingConfig) -> tuple[Path, str]:
    """The folder or hub id of the model, and the system message that it was trained with."""
    found = registered_model(name, tracking, DOWNLOADS)
    if found is not None:
        return Path(found.path), _prompt(lineage_of(name, tracking))
    check_model(name, "MODEL")
    check_model_files(name, None)
    origin = Path(name) / ORIGIN
    # Unlike Path.exists, os.path.exists accepts a name of any length.
    return Path(resolve(name)), _prompt(Lineage.load(origin)) if os.path.exists(origin) else ""  # noqa: PTH110


def _prompt(lineage: Lineage) -> str:
    return "" if lineage.system_prompt == "null" else lineage.system_prompt


def _read(console: Console) -> str | None:
    try:
        return console.input("[bold]> [/]").strip() or None
    except EOFError:
        return None
