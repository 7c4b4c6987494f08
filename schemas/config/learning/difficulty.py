"""Section `difficulty`: how hard the training prompts are for the model, and what stages need of it."""

from collections.abc import Iterator, Sequence
from typing import Annotated

from pydantic import Field, StringConstraints

from schemas.config.section import Section
from schemas.config.stage import StageConfig
from schemas.config.types import MOST_COMPLETIONS, MOST_ROWS, Fraction


class DifficultyConfig(Section):
    """How hard the training prompts are for the model, known before training."""

    samples: int = Field(0, ge=0, le=MOST_COMPLETIONS)
    """Completions of every training prompt that measure its pass rate, sampled before the first stage from the model that it
    starts from. 0: nothing is measured. 8 is a common choice."""
    screen: int = Field(0, ge=0, le=MOST_COMPLETIONS)
    """Completions of every prompt that are sampled first. A prompt that none of them solves gets no more, and its pass rate is 0.
    This saves most of the measurement where many prompts are out of reach. A prompt that is solved once in ten tries fails a
    screening of 2 four times in five. 0: all prompts get all samples."""
    success: Fraction = 0.8
    """Share of the full reward from which a completion counts as solved. The full reward is the weighted sum of the full scores
    (rewards.functions.NAME.full_score) of the functions that apply. The default needs the right answer in the right format, and
    forgives small losses of graded functions."""
    pass_rate_column: Annotated[str, StringConstraints(min_length=1, max_length=200)] | None = None
    """Column of the data with pass rates between 0 and 1, which are then used instead of measured ones. A row without a value has
    no known pass rate and is kept."""
    min_prompts: int | None = Field(None, ge=1, le=MOST_ROWS)
    """Fewest prompts that keep_pass_rate must leave. With fewer the run stops. Empty: the prompts of one rollout."""

    def faults_of(self, stages: Sequence[StageConfig]) -> Iterator[str]:
        """Where a stage needs pass rates that nothing measures."""
        measured, given = self.samples > 0, self.pass_rate_column is not None
        if self.screen and self.screen >= self.samples:
            yield (
                f"difficulty.screen is {self.screen}, and difficulty.samples is {self.samples}: a "
                "screening has fewer completions than the measurement; fix: difficulty.samples: 8, difficulty.screen: 2"
            )
        for index, stage in enumerate(stages):
            if stage.measure_difficulty and not measured:
                yield f"stages.{index}.measure_difficulty samples no completions; fix: difficulty.samples: 8"
            if stage.min_pass_at_group is not None and not (stage.measure_difficulty or (index == 0 and measured and not given)):
                yield (
                    f"stages.{index}.min_pass_at_group needs pass rates of the policy that the stage starts from; fix: "
                    f"difficulty.samples: {stage.num_generations}, and stages.{index}.measure_difficulty: true"
                )
            if stage.keep_pass_rate is not None and not measured and not given:
                yield (
                    f"stages.{index}.keep_pass_rate needs pass rates; fix: difficulty.samples: 8, or name the column of the data "
                    "that holds them with difficulty.pass_rate_column"
                )
