"""How fast this machine samples from a model and trains it: what an estimate of a run is made of."""

from pydantic import Field

from schemas.results.base import Result

DEMONSTRATIONS = "demonstrations.json"
"""File next to the spec of a trial, where a stage trains on demonstrations: its settings for them."""


class Speed(Result):
    """Seconds of the parts of a run, as a short trial found them (grpo_tasks/grpo/speed.py)."""

    device: str = "cpu"
    """Of the model: cpu or cuda."""
    load_s: float
    """Until the model is loaded, checked and ready to sample: every step with a process of its own begins with it."""
    prompt_s: float
    """Per token of a prompt that is read before sampling."""
    decode_s: float
    """Per decoding step, however many rows it has."""
    row_s: float
    """Per row of a decoding step, in addition."""
    update_s: float
    """Per update, however many tokens it has."""
    train_s: float
    """Per token that goes forwards and backwards."""
    score_s: float
    """Per token that goes forwards only."""
    reward_s: float | None = None
    """In which the reward functions score a completion; None: unknown."""
    live: float = 1.0
    """Share of groups whose rewards differ: an update computes no others."""
    generate_s: float
    """Per decoding step of transformers' generate, with which a merge is proved."""
    lengths: list[int] = Field(min_length=1)
    """Tokens of the completions of the trial."""
    ended: list[bool] = Field(min_length=1)
    """Whether each ended by itself; the trial stopped the others."""
    demonstration_tokens: float = 0.0
    """Mean length of a demonstration; 0 where no stage trains on any."""
    measured_s: float = 0.0
    """Duration of the trial."""
