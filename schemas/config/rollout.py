"""Section `rollout`: how completions are sampled, in this process or by vLLM servers."""

from typing import Annotated, ClassVar, Literal, Self

from pydantic import Field, StringConstraints, model_validator

from schemas.config.section import Section
from schemas.config.types import LONGEST_S, MOST_COMPLETIONS, MOST_PROCESSES, MOST_TIMES, MOST_TOKENS, Address, Url

VLLM_HOTTEST = 2.0


class VllmConfig(Section):
    """A vLLM server for rollouts."""

    GROUPS: ClassVar = {
        "server_details": (
            "python",
            "gpu_memory_utilization",
            "sleep",
            "overlap",
            "replicas",
            "devices",
            "tensor_parallel_size",
            "max_model_len",
            "extra_args",
            "start_timeout_s",
            "request_timeout_s",
            "concurrency",
            "retries",
            "max_restarts",
        ),
    }

    base_urls: list[Url] = Field(default_factory=list)
    """Servers that run elsewhere, such as http://10.0.0.7:8000; requests are spread over them. Empty: one is started here, and
    ended with the stage. They must read the files that the trainer writes: the same machine or a shared folder. A key they
    ask for is taken from VLLM_API_KEY."""
    sync: Literal["auto", "adapter", "merged"] = "auto"
    """How the servers take over the policy at each update. adapter: the adapter is swapped. merged: whole weights are written and
    read, which full fine-tuning always does. auto: adapter, but merged where our own server decodes on a CPU."""
    python: Address = ".venv-vllm/bin/python"
    """Python of the environment that vLLM is installed in (make vllm)."""
    gpu_memory_utilization: float = Field(0.4, gt=0.0, le=1.0)
    """Share of the card's memory that the server takes."""
    sleep: bool = False
    """The server gives the card's memory back while the policy trains (a GPU's only): for one card that both share."""
    overlap: bool = False
    """Sample the next batch while the policy trains on this one: it then comes from a policy one batch older, which
    importance_sampling_correction puts right. A checkpoint waits for no batch: the one after it is sampled anew."""
    replicas: int = Field(1, ge=1, le=MOST_PROCESSES)
    """Servers started here; requests are spread over them."""
    devices: list[str] = Field(default_factory=list)
    """Cards of the servers, one entry a replica, such as "1", or "2,3" with tensor_parallel_size 2; empty: the trainer's."""
    tensor_parallel_size: int = Field(1, ge=1, le=MOST_PROCESSES)
    """Cards that one server spreads the model over."""
    max_model_len: int | None = Field(None, ge=1, le=MOST_TOKENS)
    """Longest prompt and completion together in tokens; empty: what the model allows."""
    extra_args: list[str] = Field(default_factory=list)
    """Further flags of the server's command line."""
    start_timeout_s: float = Field(600.0, gt=0.0, le=LONGEST_S)
    """Longest time in seconds until the server is up."""
    request_timeout_s: float = Field(300.0, gt=0.0, le=LONGEST_S)
    """Longest time in seconds for one completion."""
    concurrency: int = Field(64, ge=1, le=MOST_COMPLETIONS)
    """Requests under way at once."""
    retries: int = Field(3, ge=0, le=MOST_TIMES)
    """Times a request is repeated after a fault of the connection."""
    max_restarts: int = Field(2, ge=0, le=MOST_TIMES)
    """Times that servers which died are started again before the stage stops."""

    @model_validator(mode="after")
    def _possible(self) -> Self:
        if self.overlap and self.sleep:
            raise ValueError("a server that sleeps while the policy trains cannot sample meanwhile; fix: overlap or sleep")
        if self.devices and len(self.devices) != self.replicas:
            raise ValueError(f"devices has {len(self.devices)} entries for {self.replicas} replicas; give one for each")
        return self


class RolloutConfig(Section):
    """How completions are sampled, in every stage and in the evaluation."""

    GROUPS: ClassVar = {
        "sampling_details": (
            "top_p",
            "top_k",
            "stop",
            "include_stop_str_in_output",
            "stop_token_ids",
            "max_batch_size",
        ),
    }

    engine: Literal["local", "vllm"] = "local"
    """local: our own decoding loop in the trainer's process. vllm: a vLLM server in an environment of its own."""
    vllm: VllmConfig = Field(default_factory=VllmConfig, title="vLLM")
    """Settings of engine vllm."""
    max_completion_length: int = Field(256, ge=1, le=MOST_TOKENS)
    """Longest completion in tokens."""
    temperature: float = Field(1.0, gt=0.0, le=100.0)
    """Sampling temperature while training; the policy's log-probabilities are taken at the same temperature."""
    top_p: float = Field(1.0, gt=0.0, le=1.0)
    """Nucleus sampling: keep the smallest set of tokens with this probability; 1 keeps all."""
    top_k: int = Field(0, ge=0, le=MOST_TOKENS)
    """Keep only the k likeliest tokens; 0 keeps all."""
    stop: list[Annotated[str, StringConstraints(min_length=1)]] = Field(default_factory=list)
    """Strings that end a completion, for example </answer>. A stop string may contain a special token, which is then kept in the
    text with it."""
    include_stop_str_in_output: bool = True
    """Keep the stop string in the completion's text; off: the text that rewards and evaluation see ends before it. Its tokens are
    part of the completion, and are trained on, either way."""
    stop_token_ids: list[Annotated[int, Field(ge=0, lt=2**31)]] = Field(default_factory=list)
    """Token ids that end a completion, besides the tokenizer's and generation config's own end tokens."""
    max_batch_size: int = Field(256, ge=1, le=MOST_COMPLETIONS)
    """Most completions decoded at once; more only costs memory."""

    @model_validator(mode="after")
    def _what_vllm_takes(self) -> Self:
        if self.engine == "vllm" and self.temperature > VLLM_HOTTEST:
            raise ValueError(f"vLLM takes temperatures up to {VLLM_HOTTEST:g}, not {self.temperature:g}; or engine: local")
        return self
