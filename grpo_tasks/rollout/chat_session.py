"""A chat with a model in a folder; the answer arrives in pieces while the model generates it."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from threading import Thread

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, TextIteratorStreamer

from grpo_tasks.content.tokenizer import end_token_ids, prompt_ids
from grpo_tasks.kit.cards import check_cards
from grpo_tasks.policy.load import load_errors
from schemas.prompts import PLAIN


class ChatSession:
    """A loaded model and its tokenizer. Safetensors only, no remote code. ModelError where the folder cannot be loaded, and where
    this machine has a GPU that torch cannot use."""

    def __init__(self, folder: Path) -> None:
        check_cards(place="chat", without="CUDA_VISIBLE_DEVICES= before the command")
        device = "cuda" if torch.cuda.is_available() else "cpu"
        with load_errors("the model", str(folder)):
            self._tokenizer = AutoTokenizer.from_pretrained(folder)
            self._model = AutoModelForCausalLM.from_pretrained(folder, use_safetensors=True).to(device).eval()

    def answer(
        self, messages: Sequence[dict[str, str]], *, max_new_tokens: int, greedy: bool = False, **sampling: float | None
    ) -> Iterator[str]:
        """Yield the answer's text piece by piece. `sampling` is temperature and top_p; None: as the generation config says."""
        # A model that was trained on plain prompts may have no template; it continues the text.
        plain = [{"role": PLAIN, "content": messages[-1]["content"]}]
        ids = torch.tensor([prompt_ids(self._tokenizer, messages if self._tokenizer.chat_template else plain)])
        streamer = TextIteratorStreamer(self._tokenizer, skip_prompt=True, skip_special_tokens=True)
        chosen = {name: value for name, value in sampling.items() if value is not None}
        options = {
            "input_ids": ids.to(self._model.device),
            "attention_mask": torch.ones_like(ids).to(self._model.device),
            "max_new_tokens": max_new_tokens,
            "eos_token_id": sorted(end_token_ids(self._tokenizer, self._model.generation_config.eos_token_id)) or None,
            "streamer": streamer,
            **({"do_sample": False} if greedy else {"do_sample": True, **chosen} if chosen else {}),
        }
        # generate() blocks until the answer is complete, so it runs in parallel to this generator, which reads the streamer.
        worker = Thread(target=self._model.generate, kwargs=options)
        worker.start()
        yield from streamer
        worker.join()
