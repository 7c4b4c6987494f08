"""An environment in this process that answers every turn with its number, and what a test wants said besides."""

from grpo_tasks.environments.contract import Observation, Opening
from grpo_tasks.rollout.conversations import Start
from grpo_tasks.rollout.engine import completion_seed
from schemas.config.rollout import InteractionConfig
from schemas.prompts import PromptRow

QUESTIONS = ["What is 15 + 27?", "What is 99 - 13?", "Hi"]
ACTIVE = {"environment": "tests.rollout.counting:Counting"}


def three_rows():
    """Rows with a further column."""
    chats = [({"role": "user", "content": question},) for question in QUESTIONS]
    return [PromptRow(f"{number:016x}", "d.jsonl", number, chat, "42", 9, {"level": 1}) for number, chat in enumerate(chats)]


def interaction(**settings):
    """The section of a run with an environment."""
    return InteractionConfig(**ACTIVE | settings)


class Counting:
    """Plays `turns` turns with every conversation. The reward of a turn is the share of digits among its characters.

    Args:
        turns: after this many turns a conversation is over.
        said: what is said after the number, besides it.
        role: of the answers.
        fails_at: number of the turn at which the environment of every conversation fails.
    """

    def __init__(self, turns=5, said="", role="tool", fails_at=None, opening=None):
        self.turns, self.said, self.role, self.fails_at, self.opening = turns, said, role, fails_at, opening
        self.counts, self.begun, self.texts, self.ended = {}, [], {}, []

    def schemas(self):
        return []

    def begin(self, conversations):
        self.begun += conversations
        self.counts |= {number: 0 for number, _, _ in conversations}
        self.texts |= {number: [] for number, _, _ in conversations}
        return [Opening() if self.opening is None else self.opening(*each) for each in conversations]

    def answer(self, turns):
        return [self._answer(*turn) for turn in turns]

    def end(self, conversations):
        self.ended += conversations
        return [None] * len(conversations)

    def close(self):
        self.counts.clear()

    def _answer(self, number, text):
        self.counts[number] += 1
        self.texts[number].append(text)
        count, message = self.counts[number], {"role": "assistant", "content": text}
        if count == self.fails_at:
            return Observation(message, done=True, error="it broke")
        reward = sum(character.isdigit() for character in text) / max(1, len(text))
        answers = [{"role": self.role, "content": f"{count}{self.said}"}]
        return Observation(message, answers, done=count == self.turns, reward=reward, info={"count": count})


def six_starts():
    """Two conversations for each of the rows."""
    seeds = [completion_seed(1, row.prompt_id) for row in three_rows()]
    return [Start(row, seed + index, seed) for row, seed in zip(three_rows(), seeds, strict=True) for index in range(2)]
