"""How a published model answers in MLflow: messages or a prompt in, a chat completion in OpenAI's form out, not streamed.

log_model.py copies this file into the artifact, so it imports nothing of this project. MLflow's own wrapper for transformers adds
BOS twice where the template writes it, removes spaces from answers, searches for stop strings with a tokenizer that only the
training machine has, and replies with a list that no OpenAI client reads. `tools` go to the chat template; a call is text of the
answer.
"""

import logging
import math
import os
import re
import subprocess
import time
import uuid
from collections.abc import Iterator, Mapping
from itertools import islice
from typing import Any

import pandas as pd
import torch
from mlflow.exceptions import MlflowException
from mlflow.models import set_model
from mlflow.pyfunc.model import PythonModel
from transformers import AutoModelForCausalLM, AutoTokenizer, StoppingCriteria, StoppingCriteriaList

_EXTRA_TOKENS = 4
"""Tokens that complete a character which several tokens share."""


class _Answers:
    """A model folder with the settings that its training used; `model_config` of pyfunc's load_model overrides them.

    Settings: name, max_tokens, temperature (0 is greedy), top_p, top_k, min_p, repetition_penalty, stop, stop_token_ids,
    include_stop, device (auto, cpu or cuda), dtype (auto: as saved).
    """

    def load_context(self, context: Any) -> None:
        """Load the tokenizer and the weights of the folder `model`."""
        folder, self._settings = context.artifacts["model"], dict(context.model_config or {})
        device = self._settings.get("device", "auto")
        device = _fastest_device() if device == "auto" else device
        self._tokenizer = AutoTokenizer.from_pretrained(folder)
        self._model = AutoModelForCausalLM.from_pretrained(
            folder, dtype=self._settings.get("dtype", "auto"), use_safetensors=True
        )
        self._model.to(device).eval()

    def predict(self, context: Any, model_input: Any, params: dict[str, Any] | None = None) -> Any:  # noqa: ARG002 - MLflow's signature
        """Answer one request (a dict, or a frame of one row), or each row of a frame; `MlflowException` where it cannot."""
        requests = _requests(model_input)
        answers = [self._answer(request | (params or {})) for request in requests]
        return answers[0] if len(answers) == 1 else answers

    def _answer(self, request: Mapping[str, Any]) -> dict[str, Any]:
        is_chat = request.get("messages") is not None
        ids = self._prompt_ids(request)
        settings = self._settings | {name: request[name] for name in ("temperature", "top_p", "top_k", "stop") if name in request}
        settings["max_tokens"] = request.get("max_completion_tokens") or request.get("max_tokens") or settings["max_tokens"]
        # Rewards may have read the stop string of the training; OpenAI's clients expect none of their own in the answer.
        settings["include_stop"] = "stop" not in request and settings.get("include_stop", False)
        choices, written = [], 0
        for index in range(int(request.get("n") or 1)):
            text, reason, tokens = self._complete(ids, settings)
            said = {"message": {"role": "assistant", "content": text}} if is_chat else {"text": text}
            choices.append({"index": index, "finish_reason": reason} | said)
            written += tokens
        return {
            "id": f"chatcmpl-{uuid.uuid4()}",
            "object": "chat.completion" if is_chat else "text_completion",
            "created": int(time.time()),
            "model": str(self._settings.get("name", "")),
            "choices": choices,
            "usage": {"prompt_tokens": len(ids), "completion_tokens": written, "total_tokens": len(ids) + written},
        }

    def _prompt_ids(self, request: Mapping[str, Any]) -> list[int]:
        if request.get("stream"):
            raise _refused("this model does not stream; leave out `stream`")
        messages, prompt = request.get("messages"), request.get("prompt")
        if messages is not None:
            chat = [{name: value for name, value in dict(message).items() if value is not None} for message in messages]
            if not chat:
                raise _refused("`messages` is empty")
            try:
                # Without `tools` the template shows those of the training, if there were any.
                tools = request.get("tools")
                text = self._tokenizer.apply_chat_template(chat, tools=tools, add_generation_prompt=True, tokenize=False)
            except Exception as error:  # a template raises what it likes
                raise _refused(f"the chat template refuses the messages: {error}") from error
            # The template writes special tokens such as BOS itself.
            return list(self._tokenizer(text, add_special_tokens=False)["input_ids"])
        if isinstance(prompt, str):
            return self._text_ids(prompt)
        raise _refused('a request has `messages`, a list of {"role": ..., "content": ...}, or `prompt`, a text')

    def _text_ids(self, text: str) -> list[int]:
        """As content/tokenizer.py text_ids, which this file cannot import: BOS once, and nothing behind the text."""
        bare, ids = (list(self._tokenizer("a", add_special_tokens=added)["input_ids"]) for added in (False, True))
        before = ids[: next(at for at in range(len(ids)) if ids[at : at + len(bare)] == bare)]
        tokens = list(self._tokenizer(text, add_special_tokens=False)["input_ids"])
        if tokens[:1] == before[:1]:
            return tokens
        brought = next((count for count in range(len(before), 0, -1) if tokens[:count] == before[-count:]), 0)
        return before[: len(before) - brought] + tokens

    @torch.no_grad()
    def _complete(self, ids: list[int], settings: Mapping[str, Any]) -> tuple[str, str, int]:
        """Text of one completion, why it ended, and its number of tokens."""
        stop = [settings["stop"]] if isinstance(settings.get("stop"), str) else list(settings.get("stop") or [])
        eos, written = self._model.generation_config.eos_token_id, settings.get("stop_token_ids") or []
        given = [self._tokenizer.convert_tokens_to_ids(token) if isinstance(token, str) else token for token in written]
        known = [*(eos if isinstance(eos, list) else [eos]), self._tokenizer.eos_token_id, *given]
        ends = {int(token) for token in known if token is not None}
        search = _StopSearch(self._tokenizer, stop, len(ids))
        temperature = float(settings.get("temperature") or 0.0)
        prompt = torch.tensor([ids], device=self._model.device)
        drawn = {
            "temperature": temperature,
            "top_p": float(settings.get("top_p") or 1),
            "top_k": int(settings.get("top_k") or 0),
            "min_p": float(settings.get("min_p") or 0) or None,
        }
        out = self._model.generate(
            input_ids=prompt,
            attention_mask=torch.ones_like(prompt),
            max_new_tokens=int(settings["max_tokens"]),
            do_sample=temperature > 0,
            eos_token_id=sorted(ends) or None,
            # One row is never padded; without an id, generate() warns.
            pad_token_id=0 if self._tokenizer.pad_token_id is None else self._tokenizer.pad_token_id,
            repetition_penalty=float(settings.get("repetition_penalty") or 1),
            stopping_criteria=StoppingCriteriaList([search]),
            **(drawn if temperature > 0 else dict.fromkeys(drawn)),
        )
        tokens = out[0, len(ids) :].tolist()
        text, found = search.cut(tokens, include=bool(settings.get("include_stop")))
        return text, "stop" if found or tokens[-1] in ends else "length", len(tokens)


class _StopSearch(StoppingCriteria):
    """Ends a completion at a stop string in its decoded text, and cuts the text there."""

    def __init__(self, tokenizer: Any, stop: list[str], prompt_tokens: int) -> None:
        self._tokenizer, self._stop, self._prompt_tokens = tokenizer, [text for text in stop if text], prompt_tokens
        # As content/tokenizer.py special_tokens: all_special_tokens lists only those with a role, such as EOS.
        self._special = {number: str(token) for number, token in tokenizer.added_tokens_decoder.items() if token.special}
        # Special tokens are not part of an answer, unless a stop string names one.
        self._skip = not any(token in text for text in self._stop for token in self._special.values())
        self._longest = max((len(text.encode()) for text in self._stop), default=0) + _EXTRA_TOKENS

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor, **_: Any) -> torch.Tensor:  # noqa: ARG002 - transformers' signature
        """One row: [1, S + T] -> [1], True where the completion is complete."""
        written = reversed(input_ids[0, self._prompt_tokens :].tolist())
        # As StopRule.ended: special tokens that the text lacks may stand within a stop string, however many.
        seen = (token for token in written if not (self._skip and token in self._special))
        tail = list(islice(seen, self._longest))[::-1]
        ended = bool(self._stop) and self._first(self._decoded(tail)) is not None
        return torch.tensor([ended], device=input_ids.device)

    def cut(self, tokens: list[int], *, include: bool) -> tuple[str, bool]:
        """The text up to the stop string (with it if `include`), and whether there was one."""
        found = self._first(self._decoded(tokens))
        if found is None:
            return self._tokenizer.decode(tokens, skip_special_tokens=True, clean_up_tokenization_spaces=False), False
        return self._before(tokens, found[0]) + (found[1] if include else ""), True

    def _before(self, tokens: list[int], end: int) -> str:
        """As rollout/stop.py StopRule.text: the searched text up to `end`, without the special tokens in it."""
        text, kept, at = self._decoded(tokens)[:end], list[str](), 0
        for index, token in enumerate(tokens if not self._skip else ()):
            if token not in self._special:
                continue
            first, last = (len(self._decoded(tokens[:count])) for count in (index, index + 1))
            if first >= end:
                break
            kept.append(text[at:first])
            at = last
        return "".join([*kept, text[at:]])

    def _decoded(self, tokens: list[int]) -> str:
        return str(self._tokenizer.decode(tokens, skip_special_tokens=self._skip, clean_up_tokenization_spaces=False))

    def _first(self, text: str) -> tuple[int, str] | None:
        found: Iterator[tuple[int, str]] = ((text.find(stop), stop) for stop in self._stop if stop in text)
        return min(found, default=None)


def _fastest_device() -> str:
    """Where torch computes: cuda, or cpu, with a warning where there is a GPU all the same."""
    try:
        torch.ones(1, device="cuda").add(1).item()
    except (AssertionError, RuntimeError) as error:
        # A run refuses such a machine (kit/cards.py, which this file cannot import): it would take days instead of hours. Callers
        # of a server wait for an answer, and a slow one is better than none.
        visible, driver = os.environ.get("CUDA_VISIBLE_DEVICES"), _driver()
        if driver and (visible is None or re.match(r"\s*(\d|GPU-|MIG-)", visible)):
            built = f"CUDA {torch.version.cuda}" if torch.version.cuda else "CPUs only"
            logging.getLogger(__name__).warning(
                "this machine has a GPU that torch cannot use: the driver is %s, torch %s is built for %s and says: %s; the "
                "model answers on the CPU (fix: install a driver and a torch for this GPU that fit each other)",
                *(driver, torch.__version__, built, str(error).partition("\n")[0]),
            )
        return "cpu"
    return "cuda"


def _driver() -> str:
    """The version of the driver of this machine's GPUs; empty where there is none."""
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        found = re.match(r"\d[\d.]*", subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout)
    except (OSError, subprocess.SubprocessError):
        return ""
    return found[0] if found else ""


def _requests(given: Any) -> list[dict[str, Any]]:
    rows = given.to_dict(orient="records") if isinstance(given, pd.DataFrame) else [given]
    if not all(isinstance(row, Mapping) for row in rows):
        raise _refused("a request is a JSON object with `messages`")
    # A frame has NaN where a row has no value.
    return [
        {name: value for name, value in row.items() if value is not None and not (isinstance(value, float) and math.isnan(value))}
        for row in rows
    ]


def _refused(why: str) -> MlflowException:
    return MlflowException.invalid_parameter_value(why)


class ServedModel(_Answers, PythonModel):
    """What MLflow loads. `predict` is inherited, because MLflow warns about every one without its own kind of type hints."""


set_model(ServedModel())
