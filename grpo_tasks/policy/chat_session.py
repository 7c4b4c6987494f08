"""Ask a model folder a question, token by token as it answers."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from threading import Thread

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, TextIteratorStreamer

from grpo_tasks.policy.load import load_errors


@dataclass(frozen=True, slots=True)
class ChatSettings:
    """How to answer."""

    temperature: float = 0.7
    top_p: float = 0.9
    max_new_tokens: int = 256
    greedy: bool = False


class ChatSession:
    """A loaded model. Safetensors only, no remote code."""

    def __init__(self, folder: Path) -> None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
        with load_errors("the model", str(folder)):
            self._tokenizer = AutoTokenizer.from_pretrained(folder)
            self._model = AutoModelForCausalLM.from_pretrained(folder, use_safetensors=True).to(device).eval()

    def answer(self, messages: Sequence[dict[str, str]], manner: ChatSettings) -> Iterator[str]:
        """The answer's text in pieces."""
        prompt = self._tokenizer.apply_chat_template(
            list(messages), add_generation_prompt=True, return_tensors="pt", return_dict=True
        ).to(self._model.device)
        streamer = TextIteratorStreamer(self._tokenizer, skip_prompt=True, skip_special_tokens=True)
        sampling = {"do_sample": True, "temperature": manner.temperature, "top_p": manner.top_p}
        how = {"do_sample": False} if manner.greedy else sampling
        options = {**prompt, **how, "max_new_tokens": manner.max_new_tokens, "streamer": streamer}
        worker = Thread(target=self._model.generate, kwargs=options)
        worker.start()
        yield from streamer
        worker.join()
