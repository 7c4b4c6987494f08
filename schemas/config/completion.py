"""Section `completion`: what an answer is, where it stands in a completion, and when it is right."""

from typing import Literal, Self

from pydantic import Field, model_validator

from schemas.config.section import Section
from schemas.config.types import TagName

Equality = Literal["exact", "numeric", "math", "choice"]
"""How an answer is compared with the ground truth (grpo_tasks/answers/equality.py)."""


class TagsConfig(Section):
    """Tag names of the two blocks that make up a completion in the strict format."""

    reasoning: TagName = "reasoning"
    """Tag around the reasoning: <reasoning>...</reasoning>."""
    answer: TagName = "answer"
    """Tag around the final answer: <answer>...</answer>."""

    @model_validator(mode="after")
    def _check_names(self) -> Self:
        if self.reasoning == self.answer:
            raise ValueError("reasoning and answer have the same name; fix: choose two different names")
        return self


class CompletionConfig(Section):
    """What evaluation, built-in rewards and the reward lab take for the answer of a completion, and when they call it right."""

    tags: TagsConfig = Field(default_factory=TagsConfig)
    """Tag names of the two blocks."""
    equality: Equality = "numeric"
    """How an answer is compared with the ground truth: as exact text, by numeric value, as a mathematical expression (math-
    verify), or as the letter of a multiple choice."""
