"""Conversations from their prompt to their end: the policy's turns are sampled, and an environment answers them.

Every turn continues from the exact token ids so far: those that were sampled, and those of what was said. All live conversations
of a rollout decode together. A turn's random numbers depend on the conversation's seed and on the number of the turn alone, so a
conversation does not depend on the others.

A completion ends with a turn of the policy: what was said afterwards stands in its `conversation`, and has no tokens.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from grpo_tasks.content.limited_model import limited_templates
from grpo_tasks.content.tokenizer import PLACEHOLDER, QUESTION, RefusedError, completion_text, rendered, special_tokens, turn_end
from grpo_tasks.environments.calls import END_MARKS
from grpo_tasks.environments.contract import Environments, Message, Observation, row_columns, too_long, with_tools
from grpo_tasks.environments.pool import EnvironmentPool
from grpo_tasks.policy.load import load_tokenizer
from grpo_tasks.rollout.engine import (
    Completion,
    Conversation,
    Ending,
    Request,
    RolloutEngine,
    Sampling,
    Turn,
    completion_seed,
)
from grpo_tasks.rollout.stop import StopRule
from schemas.config.completion import CompletionConfig
from schemas.config.model import ModelConfig
from schemas.config.rollout import InteractionConfig, RolloutConfig
from schemas.errors import ConfigError, ModelError
from schemas.prompts import PromptRow
from schemas.results.model import ModelRef

OTHER_BEGINNING = "the environment begins otherwise than for another conversation of the same row and seed"
_STAND_IN, _FIRST = "\ufdd2", 0xE000
"""As PLACEHOLDER, taken out of every message."""


class TurnTokens:
    """Token ids of prompts and of what follows a turn; ModelError where the tokenizer has no chat template.

        template: ... <start>assistant \\n PLACEHOLDER <end> \\n <start>tool \\n 42 <end> \\n <start>assistant \\n
        tokens:   ............ as sampled ............ <end> \\n <start>tool \\n 42 <end> \\n <start>assistant \\n
                                                             |------------- new, not written by the policy ---|

    What was sampled is never tokenised again. A marker inside a message stays text: it is taken out before the template is
    rendered, and its characters come back as ordinary tokens.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        if not tokenizer.chat_template:
            fix = "use an instruct model: messages of tools and environments need a chat template"
            raise ModelError("the tokenizer has no chat template", place=str(tokenizer.name_or_path), fix=fix)
        self._tokenizer = tokenizer
        special = special_tokens(tokenizer)
        self._special_ids = frozenset(special)
        # The longest first: a marker may begin with another one.
        self._markers = sorted(special.values(), key=len, reverse=True)
        self._end = turn_end(tokenizer) or ""
        # The limit of its length may cut a turn behind any other special token, such as the opening of a turn.
        ends = {*END_MARKS, self._end, tokenizer.eos_token}
        self._end_ids = frozenset(number for number, marker in special.items() if marker in ends)

    def closed(self, token_ids: Sequence[int]) -> bool:
        """True if the policy wrote the end of its turn."""
        return bool(token_ids) and token_ids[-1] in self._end_ids

    def prompt(self, messages: Sequence[Message]) -> list[int]:
        """Token ids of a prompt, up to the beginning of the policy's turn."""
        return self._encode(self._render([self._safe(message) for message in messages], opened=True))

    def after(self, before: Sequence[Message], turn: Message, answers: Sequence[Message], *, closed: bool) -> list[int]:
        """Token ids between two turns of the policy: the end of the first one unless it is closed, answers, next opening."""
        history = [self._safe(message) for message in before]
        said = [self._safe(message) for message in answers]
        plain = {"role": "assistant", "content": PLACEHOLDER}
        try:
            text = rendered(self._tokenizer, [*history, plain, *said], opened=True)
        except RefusedError:
            # Some templates accept the answer of a tool only after a turn with calls.
            said = _linked([*history, {**self._safe(turn), "content": PLACEHOLDER}, *said])
            text, whole = self._render(said, opened=True), self._render(said[: len(history) + 1], opened=False)
            end = next((marker for marker in self._markers if whole.endswith(marker)), None)
            if end is not None and text.startswith(whole):
                # Some write the call behind the words, and end such a turn otherwise (gpt-oss).
                return self._encode(text[len(whole) :] if closed else end + text[len(whole) :])
        # What the template writes behind the policy's words.
        _, found, text = text.rpartition(PLACEHOLDER)
        if not found or (self._end and self._end not in text):
            raise self._refused("the chat template leaves out the assistant's turn before an answer")
        if self._end:
            text = text[text.index(self._end) + len(self._end) :]
        return self._encode(text if closed else (self._end or str(self._tokenizer.eos_token or "")) + text)

    def _render(self, messages: Sequence[Message], *, opened: bool) -> str:
        try:
            return rendered(self._tokenizer, messages, opened=opened)
        except RefusedError as error:
            raise self._refused(str(error)) from error

    def _refused(self, reason: str) -> ModelError:
        fix = "use a model whose template knows the roles of the conversation (tool, user), or change the environment's messages"
        return ModelError(reason, place=str(self._tokenizer.name_or_path), fix=fix)

    def _safe(self, message: Message) -> dict[str, Any]:
        """The message with a stand-in for each marker in its texts, names of arguments included."""
        return {str(self._without_markers(key)): self._without_markers(value) for key, value in message.items()}

    def _without_markers(self, value: Any) -> Any:
        if isinstance(value, Mapping):
            # Keys too: a template may write the arguments of a call, whose names the policy has chosen.
            return {str(self._without_markers(key)): self._without_markers(item) for key, item in value.items()}
        if isinstance(value, list | tuple):
            return [self._without_markers(item) for item in value]
        if not isinstance(value, str):
            return value
        # Halves of surrogate pairs have no form in UTF-8, which tokenizers read.
        text = value.encode(errors="replace").decode()
        for reserved in (*PLACEHOLDER, _STAND_IN):
            text = text.replace(reserved, "\ufffd")
        for index, marker in enumerate(self._markers):
            text = text.replace(marker, _STAND_IN + chr(_FIRST + index) + _STAND_IN)
        return text

    def _encode(self, text: str) -> list[int]:
        ids: list[int] = []
        for index, part in enumerate(text.split(_STAND_IN)):
            # Every second part is the number of a marker that a message held.
            if not index % 2:
                ids += self._tokens(part)
                continue
            # Its characters as ordinary tokens.
            marker = self._markers[ord(part) - _FIRST]
            plain = self._tokens(marker, split_special_tokens=True)
            if self._special_ids.intersection(plain):
                plain = [token for character in marker for token in self._tokens(character)]
            ids += [token for token in plain if token not in self._special_ids]
        return ids

    def _tokens(self, text: str, **settings: bool) -> list[int]:
        return list(self._tokenizer(text, add_special_tokens=False, **settings)["input_ids"]) if text else []


def _linked(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Messages in which calls and answers have numbers of nine digits, as Mistral wants them, and no answer is without a call."""
    made: list[dict[str, Any]] = []
    answers = 0
    for message in messages:
        if message["role"] != "tool":
            calls = message.get("tool_calls") or ()
            calls = [{**call, "id": f"{number:09}"} for number, call in enumerate(calls)]
            made.append({**message, **({"tool_calls": calls} if calls else {})})
            answers = 0
            continue
        if made and made[-1]["role"] == "assistant" and not made[-1].get("tool_calls"):
            # The answer to a call that could not be read.
            unread = {"type": "function", "function": {"name": "unknown", "arguments": {}}, "id": f"{0:09}"}
            made[-1] = {**made[-1], "tool_calls": [unread]}
        made.append({**message, "tool_call_id": f"{answers:09}"})
        answers += 1
    return made


@dataclass(frozen=True, slots=True)
class Start:
    """A conversation to be played. Conversations of a row that are compared have one `environment_seed`, so one prompt."""

    row: PromptRow
    seed: int
    """Of the policy's turns; one of its own for each conversation."""
    environment_seed: int


@dataclass(slots=True)
class _Live:
    """A conversation on its way."""

    number: int
    start: Start
    prompt_ids: list[int]
    prompt: Sequence[Message]
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    policy_logprobs: list[float] | None = field(default_factory=list)
    written: list[bool] = field(default_factory=list)
    turns: list[Turn] = field(default_factory=list)
    ending: Ending | None = None
    error: str | None = None
    final_reward: float | None = None

    @property
    def messages(self) -> list[Message]:
        return [*self.prompt, *(message for turn in self.turns for message in (turn.message, *turn.answers))]

    def request(self, max_tokens: int) -> Request:
        turn = len(self.turns)
        # The seeds of a group's first turns stay consecutive, as servers like them.
        seed = completion_seed(self.start.seed, "turn", turn) if turn else self.start.seed
        return Request([*self.prompt_ids, *self.token_ids], seed, max_tokens - len(self.token_ids))

    def say(self, ids: Sequence[int]) -> None:
        """Append tokens that the policy did not write."""
        self.token_ids += ids
        self.logprobs += [0.0] * len(ids)
        self.written += [False] * len(ids)
        if self.policy_logprobs is not None:
            self.policy_logprobs += [0.0] * len(ids)

    def write(self, drawn: Completion) -> None:
        """Append a turn of the policy, which nobody has answered yet."""
        begin = len(self.token_ids)
        self.token_ids += drawn.token_ids
        self.logprobs += drawn.logprobs
        self.written += [True] * len(drawn.token_ids)
        if self.policy_logprobs is None or drawn.policy_logprobs is None:
            self.policy_logprobs = None
        else:
            self.policy_logprobs += drawn.policy_logprobs
        message = {"role": "assistant", "content": drawn.text}
        self.turns.append(Turn(begin, len(self.token_ids), drawn.text, drawn.finish_reason, message))

    def end(self, ending: Ending, error: str | None = None) -> None:
        self.ending, self.error = ending, error

    def completion(self) -> Completion:
        assert self.ending is not None
        last = self.turns[-1] if self.turns else None
        cut = self.ending in ("turns", "tokens") or (last is not None and last.finish_reason == "length")
        return Completion(
            token_ids=self.token_ids,
            logprobs=self.logprobs,
            text=last.text if last else "",
            finish_reason="length" if cut else "stop",
            policy_logprobs=self.policy_logprobs,
            written=self.written,
            conversation=Conversation(self.prompt_ids, self.prompt, self.turns, self.ending, self.error, self.final_reward),
        )


@dataclass(frozen=True, slots=True)
class Player:
    """Plays conversations, for as long as its environments are open; the chat template of `tokenizer` shows their tools."""

    environments: Environments
    config: InteractionConfig
    tokenizer: PreTrainedTokenizerBase

    def play(self, engine: RolloutEngine, starts: Sequence[Start], sampling: Sampling) -> list[Completion]:
        """One conversation for each start, in order. Starts with equal prompts should be neighbours, as requests should.

        `ConfigError` where a prompt is a string, not a chat; `ModelError` where the chat template cannot render a conversation.
        """
        tokens = TurnTokens(self.tokenizer)
        try:
            conversations = self._begin(starts, tokens)
            while live := [one for one in conversations if one.ending is None]:
                drawn = engine.generate([one.request(self.config.max_tokens) for one in live], sampling)
                for one, turn in zip(live, drawn, strict=True):
                    one.write(turn)
                texts = [(one.number, self._text(turn, tokens, sampling)) for one, turn in zip(live, drawn, strict=True)]
                for one, observation in zip(live, self.environments.answer(texts), strict=True):
                    self._continue(one, observation, tokens)
        finally:
            rewards = self.environments.end(range(len(starts)))
        for one, reward in zip(conversations, rewards, strict=True):
            if isinstance(reward, str):
                # Without what the whole is worth, its turns alone could be worth more than those of an honest one.
                one.end("error", reward)
            elif reward is None and self.config.environment is not None and one.ending in ("turns", "tokens"):
                # An environment that pays only with `done` gives nothing here. Without a 0, a policy that stalls would escape a
                # loss.
                one.final_reward = 0.0
            else:
                one.final_reward = reward
        return [one.completion() for one in conversations]

    def _begin(self, starts: Sequence[Start], tokens: TurnTokens) -> list[_Live]:
        if any(start.row.plain for start in starts):
            raise ConfigError(
                "prompts of strings cannot be answered by tools or an environment",
                place="interaction",
                fix="give the prompts as messages (data.format: conversational), or remove the section interaction",
            )
        limit, first, begun = self.config.max_prompt_tokens, dict[tuple[str, int], list[int]](), list[_Live]()
        openings = self.environments.begin(
            [(number, row_columns(start.row), start.environment_seed) for number, start in enumerate(starts)]
        )
        for number, (start, opening) in enumerate(zip(starts, openings, strict=True)):
            own, error = [dict(message) for message in start.row.messages], opening.error
            messages = [dict(message) for message in opening.messages] or own
            ids = tokens.prompt(messages)
            # The check of the data has counted the tokens of the row, and not what the environment makes of it.
            if opening.messages and len(ids) > limit:
                error, messages, ids = too_long(len(ids), limit), own, tokens.prompt(own)
            one = _Live(number, start, ids, messages)
            if error is not None:
                one.end("error", error)
            elif first.setdefault((start.row.prompt_id, start.environment_seed), ids) != ids:
                # Completions of a group are compared with each other, so they have to answer the same prompt.
                one.end("error", OTHER_BEGINNING)
            begun.append(one)
        return begun

    def _text(self, drawn: Completion, tokens: TurnTokens, sampling: Sampling) -> str:
        """The policy's turn as its environment reads it: with markers of calls, without its end or an excluded stop string."""
        if sampling.stop and not sampling.include_stop_str_in_output:
            # The searched text may lack special tokens; its end, from the stop string on, is that of the whole text.
            stopped = StopRule(self.tokenizer, frozenset(), sampling).stopped_text(drawn.token_ids)
            text = completion_text(self.tokenizer, drawn.token_ids, special=True)
            if stopped and text.endswith(stopped):
                return text.removesuffix(stopped)
        ids = drawn.token_ids[:-1] if tokens.closed(drawn.token_ids) else drawn.token_ids
        return completion_text(self.tokenizer, ids, special=True)

    def _continue(self, one: _Live, observation: Observation, tokens: TurnTokens) -> None:
        """Add what followed the turn, and end the conversation where it is over."""
        before = one.messages[:-1]
        one.turns[-1] = replace(
            one.turns[-1],
            message=observation.turn,
            answers=observation.messages,
            reward=observation.reward,
            calls=observation.calls,
            info=observation.info,
        )
        if observation.error is not None:
            one.end("error", observation.error)
        elif observation.done:
            one.end("done")
        elif len(one.turns) == self.config.max_turns:
            one.end("turns")
        else:
            closed = tokens.closed(one.token_ids)
            said = tokens.after(before, observation.turn, observation.messages, closed=closed)
            if closed and said[:1] == one.token_ids[-1:]:
                # GLM ends a turn of calls with the token that begins the answer.
                said = said[1:]
            # A turn of the policy has to fit behind it. Otherwise nothing is added: what nobody answers teaches nothing.
            if len(one.token_ids) + len(said) >= self.config.max_tokens:
                one.end("tokens")
            else:
                one.say(said)


@contextmanager
def player(
    config: InteractionConfig,
    ref: ModelRef,
    model: ModelConfig,
    rollout: RolloutConfig,
    *,
    completion: CompletionConfig,
    log: Path | None = None,
) -> Iterator[Player | None]:
    """The player of a rollout with environments of its own; None where completions are one turn each."""
    if not config.active:
        yield None
        return
    # What the policy and the environment say reaches the template too, and no check before the run has seen it.
    with limited_templates(model.path):
        tokenizer = load_tokenizer(ref, model, rollout.chat_template_kwargs)
        tags = completion.reasoning_tags
        opened = opened_reasoning(tokenizer, tags)
        environments = EnvironmentPool(
            config,
            chat_template=tokenizer.chat_template,
            response_template=tokenizer.response_template,
            reasoning=tags if opened is None else sorted(tags, key=lambda tag: tag != opened),
            # Where the template opens nothing, the turn alone says whether it begins inside a block.
            starts_inside=None if opened is None else True,
            log=log,
        )
        try:
            values = with_tools(rollout, environments.schemas()).chat_template_kwargs
            yield Player(environments, config, load_tokenizer(ref, model, values))
        finally:
            environments.close()


def opened_reasoning(tokenizer: PreTrainedTokenizerBase, tags: Sequence[str]) -> str | None:
    """The tag of the reasoning block that the chat template opens for the policy's turn; None if there is none."""
    if not tokenizer.chat_template:
        return None
    try:
        whole, before = (rendered(tokenizer, [QUESTION], opened=opened) for opened in (True, False))
    except RefusedError:
        return None
    # Only what the template adds for the turn: a system prompt may speak of the tags.
    opening = whole.removeprefix(before)
    return next((tag for tag in tags if opening.rfind(f"<{tag}>") > opening.rfind(f"</{tag}>")), None)
