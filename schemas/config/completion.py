"""Section `completion`: what an answer is, where it stands in a completion, and when it is right."""

from collections.abc import Iterator
from typing import Annotated, Literal

from pydantic import Field, StringConstraints

from schemas.config.section import Folded, Section, T
from schemas.config.types import FreeSettings, TagName

JsonAndRegex = Annotated[T, Folded("json_and_regex")]

CompletionFormat = Literal["tags", "json", "regex", "boxed", "none"]
Equality = Literal["exact", "numeric", "math", "choice", "json"]
THINK = ("think",)
"""Tags of models that were trained to reason, whatever a config calls its own."""


class TagsConfig(Section):
    """Tag names of the two blocks that make up a completion in the strict format."""

    reasoning: TagName | None = "reasoning"
    """Tag around the reasoning: <reasoning>...</reasoning>. Empty: there is no such tag, and the text before the answer block is
    the reasoning."""
    answer: TagName = "answer"
    """Tag around the final answer: <answer>...</answer>."""

    def _faults(self) -> Iterator[str]:
        if self.reasoning == self.answer:
            yield "reasoning and answer have the same name; fix: choose two different names"

    @property
    def in_order(self) -> list[str]:
        """The tags in the order of the strict format."""
        return [tag for name in (self.reasoning, self.answer) if name is not None for tag in (f"<{name}>", f"</{name}>")]

    def block(self, reasoning: str, answer: str) -> str:
        """A completion in the strict format."""
        before = reasoning if self.reasoning is None else f"<{self.reasoning}>{reasoning}</{self.reasoning}>"
        return f"{before}<{self.answer}>{answer}</{self.answer}>"


class CompletionConfig(Section):
    """What evaluation, built-in rewards and the reward lab take for the answer of a completion, and when they call it right."""

    format: CompletionFormat = "tags"
    r"""What a completion looks like, and where its answer stands. tags: a reasoning and an answer block. json: a JSON object.
    regex: text that `pattern` matches. boxed: text with a \boxed{...}. none: free text without an answer."""
    tags: TagsConfig = Field(default_factory=TagsConfig)
    """Tag names of the two blocks, for the format tags."""
    answer_key: JsonAndRegex[Annotated[str, StringConstraints(min_length=1)] | None] = None
    """Format json: the key whose value is the answer. Empty: the object has no single answer, so accuracy is not measured; with
    equality json the whole object is the answer."""
    required: JsonAndRegex[list[str]] = Field(default_factory=list)
    """Format json: keys that the object must have."""
    json_schema: JsonAndRegex[FreeSettings | None] = None
    """Format json: a JSON Schema (draft 2020-12) that the object must fit. It may refer to nothing
    outside itself, and its patterns have the syntax of RE2."""
    pattern: JsonAndRegex[Annotated[str, StringConstraints(min_length=1)] | None] = None
    """Format regex: regular expression whose first group is the answer, for example `#### (.+)`. The last match counts. The
    syntax is that of RE2, which takes linear time: no look-around, no back-references."""
    equality: Equality = "numeric"
    """How an answer is compared with the ground truth: as exact text, by numeric value, as a mathematical expression (math-
    verify), as the letter of a multiple choice, or as JSON (the same keys and values, whatever their order)."""

    @property
    def reasoning_tags(self) -> tuple[str, ...]:
        """Names of the tags around reasoning, in which no call counts."""
        own = self.tags.reasoning if self.format == "tags" else None
        return THINK if own is None or own in THINK else (*THINK, own)

    @property
    def has_blocks(self) -> bool:
        """Whether a completion is a reasoning and an answer block."""
        return self.format == "tags" and self.tags.reasoning is not None

    @property
    def is_free_text(self) -> bool:
        """Whether a completion has no format that it could break, and no answer."""
        return self.format == "none"

    @property
    def has_answer(self) -> bool:
        """Whether completions of this format have an answer that can equal a ground truth."""
        return not self.is_free_text and not self.answer_fix

    @property
    def answer_fix(self) -> str:
        """The setting that gives completions an answer; empty where they have one, and where none can."""
        if self.format != "json" or self.answer_key is not None or self.equality == "json":
            return ""
        return "completion.answer_key: KEY, or completion.equality: json to compare whole objects"

    def refusal(self, function: str) -> str:
        """Why a built-in reward function makes no sense for this format, with the fix; empty when it does."""
        if function in ("correctness", "format") and self.is_free_text:
            return "free text has no format and no answer; fix: another completion.format, or a reward function of your own"
        if function == "correctness" and not self.has_answer:
            return f"the JSON object has no answer to compare; fix: {self.answer_fix}"
        if function == "incremental_format" and self.format != "tags":
            instead = "length" if self.is_free_text else "format"
            return f"completion.format: {self.format} has no tags to count; fix: {instead}, or completion.format: tags"
        if function == "style" and self.format in ("json", "none"):
            return f"completion.format: {self.format} has no reasoning and answer to look at; fix: leave it out, or length"
        return ""

    def _faults(self) -> Iterator[str]:
        fields = {"json": ("answer_key", "required", "json_schema"), "regex": ("pattern",)}
        for format_, names in fields.items():
            given = [name for name in names if getattr(self, name)]
            if given and self.format != format_:
                yield (
                    f"{given[0]} belongs to completion.format: {format_}, and the format is {self.format}; "
                    f"fix: format: {format_}, or leave {given[0]} out"
                )
        if self.format == "regex" and not self.pattern:
            yield "format: regex needs a pattern with a group for the answer; fix: pattern: '#### (.+)'"
