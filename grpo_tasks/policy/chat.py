"""Chat messages to token ids, and completions back to text. The text of a completion is never tokenised again."""

from collections.abc import Mapping, Sequence

from transformers import PreTrainedTokenizerBase

from grpo_tasks.content.tokenizer import text_ids, turn_end
from schemas.errors import ModelError
from schemas.prompts import PLAIN

Message = Mapping[str, str]


def prompt_ids(tokenizer: PreTrainedTokenizerBase, messages: Sequence[Message]) -> list[int]:
    """Token ids of a prompt up to the beginning of the assistant's turn; ModelError for a chat without a chat template."""
    if messages[0]["role"] == PLAIN:
        return text_ids(tokenizer, [messages[0]["content"]])[0]
    if not tokenizer.chat_template:
        raise ModelError(
            "the tokenizer has no chat template", place=str(tokenizer.name_or_path), fix="use an instruct model, or plain prompts"
        )
    # The template writes special tokens such as BOS itself; the tokenizer must not add them a second time.
    text = tokenizer.apply_chat_template([dict(message) for message in messages], add_generation_prompt=True, tokenize=False)
    return tokenizer(text, add_special_tokens=False)["input_ids"]


def completion_text(tokenizer: PreTrainedTokenizerBase, token_ids: Sequence[int], *, special: bool = False) -> str:
    """Text with its whitespace unchanged; with `special` it includes special tokens (end of turn, padding)."""
    return tokenizer.decode(list(token_ids), skip_special_tokens=not special, clean_up_tokenization_spaces=False)


def end_token_ids(tokenizer: PreTrainedTokenizerBase, generation_eos: int | Sequence[int] | None) -> frozenset[int]:
    """Token ids that end a turn: the tokenizer's, those of the model's generation config, and the one of the chat template."""
    end = turn_end(tokenizer)
    listed = [generation_eos] if isinstance(generation_eos, int) else list(generation_eos or [])
    # A model that was tuned with this template ends with its token, whatever the other two name.
    ends = [tokenizer.eos_token_id, None if end is None else tokenizer.convert_tokens_to_ids(end), *listed]
    return frozenset(number for number in ends if number is not None)
