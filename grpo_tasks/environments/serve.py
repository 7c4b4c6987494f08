"""`python -P -m grpo_tasks.environments.serve FD`: the process that tools and environments run in. pool.py starts it.

It imports what the configuration names, then answers one request after another: JSON in frames on a socket of their own, so that
nothing that a tool prints can be taken for a reply. A hang is ended from outside. A user's code can reach everything in this
process, so the parent checks every reply (replies.py).
"""

import ctypes
import json
import os
import sys
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy  # noqa: F401 - a tool that imports it in its body would draw unseeded numbers in its first call (forms.py)

from grpo_tasks.environments import forms
from grpo_tasks.processes.framing import read_frame, write_frame
from grpo_tasks.processes.lifetime import die_with_parent
from schemas.config.learning.interaction import InteractionConfig
from schemas.errors import UserError
from schemas.secret import hide_output

# Kept here because a user's code may replace them in the module json.
_dumps, _loads = json.dumps, json.loads


def main() -> None:
    """Answer requests until the parent closes the socket."""
    die_with_parent()
    descriptor = int(sys.argv[1])
    os.set_inheritable(descriptor, False)
    # Line by line, so that output from before a hang or a crash is not lost.
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    hide_output()
    with suppress(EOFError):
        request = _loads(read_frame(descriptor))
        folders = [Path(one) for one in request["folders"]]
        # At the end of the path, so that a file in one of these folders cannot replace an installed library.
        sys.path.extend(str(folder.resolve()) for folder in folders)
        try:
            config = InteractionConfig.model_validate(request["config"])
            loaded, schemas = forms.load(config, folders, with_schemas=request["with_schemas"])
        except UserError as error:
            _reply(descriptor, request, {"error": error.to_json()})
            return
        form = "tools" if loaded.make is None else ("steps" if loaded.steps else "methods")
        flags = {"own_calls": loaded.own_calls, "rewards_at_end": loaded.rewards_at_end}
        _reply(descriptor, request, {"form": form, "schemas": schemas, **flags})
        table = _Table(loaded)
        while True:
            request = _loads(read_frame(descriptor))
            _reply(descriptor, request, table.answer(request))


class _Table:
    """The conversations of this process."""

    def __init__(self, loaded: forms.ImportedObjects) -> None:
        self._loaded = loaded
        self._played: dict[int, forms.Played] = {}

    def answer(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """The reply to one request."""
        what, limit = request["what"], self._loaded.config.max_answer_chars
        if what == "end":
            for conversation in request["conversations"]:
                played = self._played.pop(conversation, None)
                if played is not None:
                    forms.end(played)
            return {}
        conversation = request["conversation"]
        forms.seed_generators(request["seed"])
        if what == "begin":
            begun, reply = forms.begin(self._loaded, request["row"], request["seed_of_row"])
            if begun is not None:
                self._played[conversation] = begun
            return reply
        played = self._played[conversation]
        if what == "call":
            return forms.call(played, request["name"], request["arguments"], limit)
        if what == "step":
            return forms.step(played, request["text"], request["turn"], limit)
        if what == "perfect":
            return forms.perfect_turns(played, request["row"])
        return forms.final_reward(played)


def _reply(descriptor: int, request: Mapping[str, Any], reply: Mapping[str, Any]) -> None:
    # Output of C code is still in the buffer of the C library.
    with suppress(Exception):
        sys.stdout.flush()
        sys.stderr.flush()
        ctypes.CDLL(None).fflush(None)
    # A policy can put lone surrogates into arguments of a tool. UTF-8 has no form for them, and the parent refuses their escapes.
    text = _dumps({"request": request["request"], **reply}, ensure_ascii=False)
    write_frame(descriptor, text.encode(errors="replace"))


if __name__ == "__main__":
    main()
