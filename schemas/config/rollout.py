"""Sections `rollout` and `interaction`: how completions are sampled, and what answers the policy between two turns."""

import json
import re
from collections.abc import Iterator
from datetime import date
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, StringConstraints

from schemas.config.section import Folded, Section, T
from schemas.config.types import LONGEST_S, MOST_COMPLETIONS, MOST_PROCESSES, MOST_TIMES, MOST_TOKENS, Address, FreeSettings, Url
from schemas.secret import has_password

ServerDetails = Annotated[T, Folded("server_details")]
SamplingDetails = Annotated[T, Folded("sampling_details")]

VLLM_MAX_TEMPERATURE = 2.0
OWN_FLAGS = ("--host", "--port", "--api-key")
"""Flags that a server started here sets itself."""


OWN_TEMPLATE_ARGUMENTS = (
    "messages", "conversation", "add_generation_prompt", "continue_final_message", "tokenize", "chat_template", "return_dict",
    "return_tensors",
)  # fmt: skip
"""What the pipeline itself passes to a chat template, and options of the call that are no variables of the template."""


class VllmConfig(Section):
    """vLLM servers that sample the completions."""

    base_urls: list[Url] = Field(default_factory=list)
    """Addresses of running servers, such as http://10.0.0.7:8000; each process of a stage has one queue for all of them. They see
    the files that the trainer writes, or there are `weights_urls`. Their API key is read from VLLM_API_KEY. One that does not
    answer at the start joins when it does. Empty: the stage starts servers of its own and ends them."""
    weights_urls: ServerDetails[list[Url]] = Field(default_factory=list)
    """Addresses of `grpo weights-server`, one for each entry of base_urls, for servers that do not see the files of the trainer.
    The weights of each policy are sent there. Empty: the servers read them from the trainer's folder."""
    sync: Literal["auto", "adapter", "merged"] = "auto"
    """How the servers receive the policy after each update. adapter: they load the adapter. merged: they load all weights;
    full fine-tuning always does this. auto: adapter, except for a server started here that runs on a CPU in float32, which gets
    merged weights. In 16 bits merged weights lose small updates."""
    python: ServerDetails[Address] = ".venv-vllm/bin/python"
    """Python of the environment with vLLM (`make vllm` creates it)."""
    gpu_memory_utilization: ServerDetails[float] = Field(0.4, gt=0.0, le=1.0)
    """Share of the GPU's memory that the server reserves."""
    sleep: ServerDetails[bool] = False
    """Release the server's GPU memory while the policy trains, for one GPU that server and trainer share."""
    replicas: ServerDetails[int] = Field(1, ge=1, le=MOST_PROCESSES)
    """Number of servers to start. Each process of a stage has one queue for all of them: the least loaded server takes the next
    group. One that fails or does not answer in time is left out, and others sample its requests."""
    devices: ServerDetails[list[str]] = Field(default_factory=list)
    """GPUs of the servers, one entry per replica, such as "1", or "2,3" with tensor_parallel_size 2. Empty: one server
    uses the cards of the trainer; several servers get cards of their own, the last ones."""
    tensor_parallel_size: ServerDetails[int] = Field(1, ge=1, le=MOST_PROCESSES)
    """Number of GPUs that share the model of one server."""
    max_model_len: ServerDetails[int | None] = Field(None, ge=1, le=MOST_TOKENS)
    """Longest prompt plus completion in tokens. Empty: the limit of the model, without a GPU at most 4,096."""
    extra_args: ServerDetails[list[str]] = Field(default_factory=list)
    """Additional command-line flags of the server."""
    start_timeout_s: ServerDetails[float] = Field(600.0, gt=0.0, le=LONGEST_S)
    """Time limit in seconds for the start of a server."""
    request_timeout_s: ServerDetails[float] = Field(300.0, gt=0.0, le=LONGEST_S)
    """Time limit in seconds of one request. A server that exceeds it is examined, and others sample its requests."""
    concurrency: ServerDetails[int] = Field(64, ge=1, le=MOST_COMPLETIONS)
    """Highest number of concurrent requests of one server, divided among the processes of a stage (at least 1 for each). A
    server that answers 429 or 503 rests for a while, and then gets one at a time until it answers."""
    retries: ServerDetails[int] = Field(3, ge=0, le=MOST_TIMES)
    """How often a request is repeated after a connection error."""
    max_restarts: ServerDetails[int] = Field(2, ge=0, le=MOST_TIMES)
    """How often a server that failed is restarted or tried again before it is left out. The stage stops when none is left. On a
    Ray cluster the driver counts failures in a row, those of starts included, and pauses longer after each."""
    patience_s: ServerDetails[float] = Field(0.0, ge=0.0, le=LONGEST_S)
    """How long (s) a stage waits when no server is left, for one that somebody starts again. 0: it stops at once. On a Ray
    cluster, which replaces its servers, a stage waits for half an hour at least."""

    def _faults(self) -> Iterator[str]:
        if self.devices and len(self.devices) != self.replicas:
            yield f"devices has {len(self.devices)} entries for {self.replicas} replicas; fix: one entry per replica"
        for flag in OWN_FLAGS:
            if any(given.partition("=")[0] == flag for given in self.extra_args):
                yield (
                    f"extra_args: a server started here sets {flag} itself and listens on 127.0.0.1 only; fix: leave it out. "
                    "Its key comes from VLLM_API_KEY. Start a server for other machines by hand and name it in base_urls"
                )
        if self.weights_urls and len(self.weights_urls) != len(self.base_urls):
            yield f"weights_urls has {len(self.weights_urls)} entries for {len(self.base_urls)} base_urls; fix: one for each"
        if any(has_password(address) for address in (*self.base_urls, *self.weights_urls)):
            yield "base_urls or weights_urls contains a password, and a config is recorded; fix: export VLLM_API_KEY"


TEMPLATE_DATE = "strftime_now"
"""The function with which a chat template writes the present day. As a variable of the template, its value is the day."""


class RolloutConfig(Section):
    """How completions are sampled, in all stages and in the evaluation."""

    engine: Literal["local", "vllm"] = "local"
    """local: our own decoding loop in the process of the trainer. vllm: a vLLM server with an environment of its own."""
    vllm: VllmConfig = Field(default_factory=VllmConfig, title="vLLM")
    """Settings of engine vllm."""
    max_completion_length: int = Field(256, ge=1, le=MOST_TOKENS)
    """Longest completion in tokens."""
    temperature: float = Field(1.0, gt=0.0, le=100.0)
    """Sampling temperature in training. The policy's log-probabilities are computed at the same temperature."""
    top_p: SamplingDetails[float] = Field(1.0, gt=0.0, le=1.0)
    """Nucleus sampling: sample from the smallest set of tokens with at least this probability. 1: from all tokens."""
    top_k: SamplingDetails[int] = Field(0, ge=0, le=MOST_TOKENS)
    """Sample from the k likeliest tokens. 0: from all tokens."""
    min_p: SamplingDetails[float] = Field(0.0, ge=0.0, le=1.0)
    """Sample only from tokens at least this share as likely as the likeliest one (arXiv:2407.01082). 0: from all tokens."""
    repetition_penalty: SamplingDetails[float] = Field(1.0, gt=0.0, le=100.0)
    """Above 1, tokens that already occurred become less likely (arXiv:1909.05858), in greedy decoding too. 1: off."""
    chat_template_kwargs: SamplingDetails[dict[str, Any]] = Field(default_factory=dict)
    """Variables of the model's chat template, for example {enable_thinking: false}. They apply wherever the run renders a prompt.
    The template of the merged model keeps them as defaults. A template that writes the present day writes that of the first run
    in the folder of results; {strftime_now: '2026-11-26'} names another one."""
    stop: SamplingDetails[list[Annotated[str, StringConstraints(min_length=1)]]] = Field(default_factory=list)
    """Strings that end a completion, for example </answer>. A special token in a stop string stays in the text."""
    include_stop_str_in_output: SamplingDetails[bool] = True
    """Keep the stop string in the text that rewards and evaluation see. Its tokens are trained on either way."""
    stop_token_ids: SamplingDetails[
        list[Annotated[int, Field(ge=0, lt=2**31)] | Annotated[str, StringConstraints(min_length=1)]]
    ] = Field(default_factory=list)
    """Tokens that end a completion, by id or by text, besides those of the tokenizer and of the generation config."""
    max_batch_size: SamplingDetails[int] = Field(256, ge=1, le=MOST_COMPLETIONS)
    """Largest number of completions that are decoded at once. A higher value costs memory."""
    max_staleness: SamplingDetails[int] = Field(0, ge=0, le=MOST_TIMES)
    """Largest number of updates between the policy that samples a rollout and the one that first trains on it, for engine vllm.
    0: sampling and training take turns. 1 and more: the servers sample the next rollouts while the policy trains, and
    importance_sampling_correction corrects for the difference; off_policy_mask_threshold leaves out what has become improbable.
    No rollout is in flight at a checkpoint or a held-out evaluation, so a resumed stage samples from the same policies."""

    def _faults(self) -> Iterator[str]:
        for name in self.chat_template_kwargs:
            if name in OWN_TEMPLATE_ARGUMENTS:
                yield f"chat_template_kwargs: {name} is set by the pipeline; fix: leave it out"
            if not name.isidentifier() or not name.isascii():
                yield f"chat_template_kwargs: {name!r} is not the name of a variable; fix: letters, digits and _"
        if TEMPLATE_DATE in self.chat_template_kwargs:
            try:
                date.fromisoformat(self.chat_template_kwargs[TEMPLATE_DATE])
            except (TypeError, ValueError) as error:
                raise ValueError(
                    f"chat_template_kwargs: {TEMPLATE_DATE} is the day that the template writes; fix: '2026-11-26', in quotes"
                ) from error
        try:
            json.dumps(self.chat_template_kwargs)
        except TypeError as error:
            raise ValueError(f"chat_template_kwargs: {error}; fix: strings, numbers, booleans, lists and mappings") from error
        if self.max_staleness and self.engine != "vllm":
            yield "only a server can sample while the policy trains; fix: max_staleness: 0, or engine: vllm"
        if self.max_staleness and self.vllm.sleep:
            yield "a server that sleeps while the policy trains cannot sample; fix: max_staleness: 0, or sleep: false"
        if self.engine == "vllm" and self.temperature > VLLM_MAX_TEMPERATURE:
            yield (
                f"vLLM supports temperatures up to {VLLM_MAX_TEMPERATURE:g}, not {self.temperature:g}; "
                "fix: lower it, or engine: local"
            )


_REFERENCE = r"^[\w.]+:[\w.]+$"
Reference = Annotated[str, StringConstraints(pattern=_REFERENCE, max_length=200)]
"""module:function or module:Class."""
CallFormat = Literal["auto", "hermes", "xml", "glm", "harmony", "mistral", "llama", "json"]


class InteractionConfig(Section):
    """What answers the policy between two turns. Without tools and without an environment a completion is one turn."""

    tools: list[Reference] = Field(default_factory=list, max_length=64)
    """Typed Python functions with docstrings that the policy may call, as module:function. Their signatures become the schemas
    that the chat template shows."""
    environment: Reference | None = None
    """Class or factory with reset and step, as module:Class; one instance a conversation."""
    settings: FreeSettings = Field(default_factory=dict)
    """Keyword arguments of the environment."""
    call_format: CallFormat = "auto"
    """How the model writes a call. auto: as the response template of its tokenizer says, or else as its chat template does.
    hermes: JSON in <tool_call> tags (Qwen 2.5 and 3). xml: <function=NAME> and <parameter=KEY> in these tags (Qwen 3.5,
    Qwen3-Coder). glm: <arg_key> and <arg_value> in them. harmony: the commentary channel of gpt-oss. mistral: [TOOL_CALLS].
    llama: a JSON object with name and parameters, and nothing else. json: a JSON object in <tool_call> tags, or alone."""
    max_turns: int = Field(8, ge=1, le=256)
    """Turns of the policy in one conversation. One that runs out of them is truncated."""
    max_tool_calls: int = Field(16, ge=0, le=1024)
    """Calls in one conversation. Further ones are answered with an error."""
    max_tokens: int = Field(4096, ge=16, le=MOST_TOKENS)
    """Tokens of a conversation after its prompt, answers of tools included. rollout.max_completion_length limits each turn."""
    max_prompt_tokens: int = Field(4096, ge=1, le=MOST_TOKENS)
    """Tokens of a prompt that an environment begins with, after the chat template. A longer one ends its conversation with an
    error. validation.max_prompt_length limits the prompts of the data."""
    max_answer_chars: int = Field(4_000, ge=16, le=1_000_000)
    """Characters kept of one answer of a tool or environment."""
    timeout_s: float = Field(10.0, gt=0.0, le=3600.0)
    """Seconds that one call, one reset or one step may take. Then its worker is ended."""
    memory_mb: int = Field(1024, ge=256, le=1_048_576)
    """Memory in MiB that a worker process may take, with everything that it starts. Resident memory is measured every 0.05 s; the
    conversations of a worker share it. Python and what makes the schemas of tools take about 130 MiB."""
    workers: int = Field(2, ge=1, le=256)
    """Worker processes."""
    module_dir: Path | None = None
    """Folder with the modules of your tools or environment. Empty: as for rewards.module_dir."""

    def _faults(self) -> Iterator[str]:
        if self.tools and self.environment:
            yield "tools and environment are both given; fix: offer the tools from the environment, or remove one"
        if self.settings and not self.environment:
            yield "settings belong to an environment; fix: environment: module:Class, or leave settings out"

    @property
    def references(self) -> list[str]:
        """The tools, or the environment, as module:name."""
        return [*self.tools, *([self.environment] if self.environment else [])]

    def module_dirs(self) -> list[Path]:
        """Folders that are searched for the modules of your tools or environment, after the installed packages."""
        return [Path.cwd(), *([self.module_dir] if self.module_dir is not None else [])]

    @property
    def own_code(self) -> list[str]:
        """The references, and what the settings of the environment name in the same way: it may load that itself."""
        return [*self.references, *references_in(self.settings)]

    def longest(self, rollout: RolloutConfig) -> int:
        """The most tokens after a prompt."""
        return self.max_tokens if self.active else rollout.max_completion_length

    def longest_prompt(self, of_data: int) -> int:
        """The most tokens of a prompt. An environment begins with prompts of its own, perhaps longer than those in the data."""
        return max(of_data, self.max_prompt_tokens) if self.environment else of_data

    @property
    def active(self) -> bool:
        """True if conversations have turns of somebody else."""
        return bool(self.tools) or self.environment is not None


def references_in(value: object) -> Iterator[str]:
    """Every text in a tree of mappings and lists that has the form module:name, whether there is such a module or not."""
    if isinstance(value, str):
        if re.match(_REFERENCE, value):
            yield value
    elif isinstance(value, dict):
        for item in value.values():
            yield from references_in(item)
    elif isinstance(value, list):
        for item in value:
            yield from references_in(item)
