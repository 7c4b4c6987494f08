"""A chat with a model in a folder; the answer arrives in pieces while the model generates it."""

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import SimpleQueue

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, StoppingCriteria, StoppingCriteriaList

from grpo_tasks.content.tokenizer import end_token_ids, prompt_ids
from grpo_tasks.kit.cards import check_cards
from grpo_tasks.policy.load import load_errors
from grpo_tasks.rollout.engine import Sampling
from grpo_tasks.rollout.stop import StopRule
from schemas.config.rollout import RolloutConfig
from schemas.prompts import PLAIN


class ChatSession:
    """A loaded model and its tokenizer. Safetensors only, no remote code. ModelError where the folder cannot be loaded, and where
    this machine has a GPU that torch cannot use. Answers end at the stop strings that the model was trained with, which no file
    of transformers' keeps."""

    def __init__(self, folder: Path, *, stop: Sequence[str] = (), include_stop: bool = True) -> None:
        check_cards(place="chat", without="CUDA_VISIBLE_DEVICES= before the command")
        device = "cuda" if torch.cuda.is_available() else "cpu"
        with load_errors("the model", str(folder)):
            self._tokenizer = AutoTokenizer.from_pretrained(folder)
            self._model = AutoModelForCausalLM.from_pretrained(folder, use_safetensors=True).to(device).eval()
        ends = end_token_ids(self._tokenizer, self._model.generation_config.eos_token_id)
        rollout = RolloutConfig(stop=list(stop), include_stop_str_in_output=include_stop)
        self._rule = StopRule(self._tokenizer, ends, Sampling.of(rollout))

    def answer(
        self, messages: Sequence[dict[str, str]], *, max_new_tokens: int, greedy: bool = False, **sampling: float | None
    ) -> Iterator[str]:
        """Yield the answer's text piece by piece. `sampling` is temperature and top_p; None: as the generation config says."""
        # A model that was trained on plain prompts may have no template; it continues the text.
        plain = [{"role": PLAIN, "content": messages[-1]["content"]}]
        ids = torch.tensor([prompt_ids(self._tokenizer, messages if self._tokenizer.chat_template else plain)])
        written = _Written(self._rule, ids.shape[1])
        chosen = {name: value for name, value in sampling.items() if value is not None}
        options = {
            "input_ids": ids.to(self._model.device),
            "attention_mask": torch.ones_like(ids).to(self._model.device),
            "max_new_tokens": max_new_tokens,
            "eos_token_id": sorted(self._rule.end_ids) or None,
            "stopping_criteria": StoppingCriteriaList([written]),
            **({"do_sample": False} if greedy else {"do_sample": True, **chosen} if chosen else {}),
        }
        # generate() blocks until the answer is complete, so it runs in parallel to this generator.
        with ThreadPoolExecutor(1) as worker:
            made = worker.submit(self._model.generate, **options)
            made.add_done_callback(lambda _: written.tokens.put(None))
            yield from self._pieces(written)
            made.result()

    def _pieces(self, written: "_Written") -> Iterator[str]:
        sampling, ids, shown = self._rule.sampling, list[int](), 0
        # The beginning of a stop string that will not be part of the text.
        held = 0 if sampling.include_stop_str_in_output else max((len(stop) - 1 for stop in sampling.stop), default=0)
        while (token := written.tokens.get()) is not None:
            ids.append(token)
            text = self._rule.text(ids)
            # A character of several tokens is complete with the last of them.
            ready = len(text.rstrip("\ufffd")) - held
            if ready > shown:
                yield text[shown:ready]
                shown = ready
        yield self._rule.text(ids)[shown:]


class _Written(StoppingCriteria):
    """The tokens of an answer as generate() writes them, and None at its end; says at which one it ends."""

    def __init__(self, rule: StopRule, prompt_tokens: int) -> None:
        self.tokens: SimpleQueue[int | None] = SimpleQueue()
        self._rule, self._prompt_tokens = rule, prompt_tokens

    def __call__(self, input_ids: Tensor, scores: Tensor | None, **_: object) -> Tensor:  # noqa: ARG002 - transformers' signature
        """One row: [1, S + T] -> [1], True where the answer is complete."""
        ids = input_ids[0, self._prompt_tokens :].tolist()
        self.tokens.put(ids[-1])
        return torch.tensor([self._rule.ended(ids)], device=input_ids.device)
