"""The vLLM engines: token ids in, token ids out over HTTP, one request for all completions of a group.

    VllmSampler   samples from a model that does not change (evaluation, reward lab)
    VllmEngine    samples from the policy in training. sync(): save the weights -> wake up sleeping servers -> load the weights
                  -> compare log-probabilities -> delete the previous weights

If a server kept old weights, training would continue on completions of the wrong policy without any error. So after each load the
engine compares the log-probabilities of a few tokens with the trainer's. A server that dies is restarted and loads the policy;
then the complete batch is requested again. Every completion has its own seed, so the repeated batch is the same.
"""

import gc
import shutil
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from itertools import cycle, repeat
from pathlib import Path
from typing import Any, Literal, TypeVar
from uuid import uuid4

import httpx
import tenacity
import torch
from jaxtyping import Float
from transformers import PreTrainedTokenizerBase

from grpo_tasks.policy.batch import token_batch
from grpo_tasks.policy.chat import end_token_ids
from grpo_tasks.policy.folded_adapter import CausalLM
from grpo_tasks.policy.load import save_for_server, save_trained, trained_weights
from grpo_tasks.policy.logprobs import completion_logprobs
from grpo_tasks.policy.sharded import sampling_copy
from grpo_tasks.rollout.engine import Completion, Request, Sampling
from grpo_tasks.rollout.stop import StopRule
from grpo_tasks.rollout.vllm_server import VllmServer, authorization
from schemas.config.rollout import VllmConfig
from schemas.errors import RolloutError, ServerGoneError

PROBE_IDS = [3 + 7 * index % 200 for index in range(12)]
"""Arbitrary token ids that every vocabulary has."""
PROBE_LIMIT = {"float32": 1e-3, "bfloat16": 0.15, "float16": 0.05}
"""Largest allowed mean difference (nats per token) between server and trainer on the probe."""

Output = TypeVar("Output")


class VllmSampler:
    """Samples from servers that all serve the same model.

    Args:
        tokenizer: the model's.
        generation_eos: end-of-sequence tokens of the model's generation config.
        config: limits and retries.
        servers: requests are distributed over them; the caller ends them.
        adapter: folder of a PEFT adapter to load on the servers' base model; None samples from the base model.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        generation_eos: int | Sequence[int] | None,
        config: VllmConfig,
        servers: Sequence[VllmServer],
        adapter: Path | None = None,
    ) -> None:
        self._tokenizer, self._config, self._servers = tokenizer, config, list(servers)
        self._end_ids = end_token_ids(tokenizer, generation_eos)
        self._client = httpx.Client(headers=authorization(), timeout=httpx.Timeout(config.request_timeout_s, connect=10.0))
        self._restarts = 0
        self._merged = self._asleep = False
        # A unique name: on a shared server it collides neither with other users' adapters nor with those of an earlier attempt.
        self._run = f"policy-{uuid4().hex[:8]}"
        self._name: str | None = None if adapter is None else self._run
        self._folder = adapter

    def sync(self) -> None:
        """Load the adapter into the servers."""
        self._with_restarts(self._load_weights)

    def generate(self, requests: Sequence[Request], sampling: Sampling) -> list[Completion]:
        """One completion per request, in order; see `RolloutEngine`.

        Raises:
            RolloutError: a server refuses a request, or died more often than `max_restarts`.
        """
        stop = StopRule.of(self._tokenizer, self._end_ids, sampling)
        return [self._completion(answer, stop) for answer in self._with_restarts(lambda: self._answers(requests, stop))]

    def sleep(self) -> None:
        """Release the GPU memory of the servers until the next `sync`, if `rollout.vllm.sleep` is on."""
        if self._config.sleep:
            for server in self._servers:
                self._post(server, "/sleep?level=1", {})
            self._asleep = True

    def close(self) -> None:
        """Unload the adapter; the servers may keep running."""
        # A server that is gone has nothing to unload, and all completions have been delivered.
        with suppress(ServerGoneError):
            if self._name is not None:
                self._unload(self._name)
        self._client.close()

    def _answers(self, requests: Sequence[Request], stop: StopRule) -> list[dict[str, Any]]:
        # A restarted server has lost the weights; the others load nothing here.
        self._load_weights()
        with ThreadPoolExecutor(self._config.concurrency) as pool:
            try:
                answers = pool.map(self._complete, cycle(self._servers), _groups(requests), repeat(stop))
                return [answer for group in answers for answer in group]
            except RolloutError:
                pool.shutdown(cancel_futures=True)
                raise

    def _complete(self, server: VllmServer, group: Sequence[Request], stop: StopRule) -> list[dict[str, Any]]:
        sampling = stop.sampling
        body = {
            "model": self._model(server),
            "prompt": list(group[0].prompt_ids),
            "n": len(group),
            "max_tokens": sampling.max_completion_length,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "top_k": sampling.top_k or -1,
            "min_p": sampling.min_p,
            "repetition_penalty": sampling.repetition_penalty,
            "seed": _seed(group[0]),
            "logprobs": 0,
            "return_token_ids": True,
            "stop": list(sampling.stop),
            "include_stop_str_in_output": True,
            "stop_token_ids": sorted(stop.end_ids),
            # The server searches for stop strings in the text that it decodes. It must decode as `StopRule` does.
            "skip_special_tokens": not stop.reads_special_tokens,
        }
        answers: list[dict[str, Any]] = self._post(server, "/v1/completions", body)["choices"]
        if len(answers) != len(group):
            raise RolloutError(f"the server returned {len(answers)} completions, not {len(group)}", place=server.address)
        if any(answer.get("token_ids") is None for answer in answers):
            raise RolloutError(
                "this version of vLLM returns no token ids",
                place=server.address,
                fix="use vLLM 0.32 or another that returns them",
            )
        return sorted(answers, key=lambda answer: int(answer["index"]))

    def _completion(self, answer: dict[str, Any], stop: StopRule) -> Completion:
        ids, logps = list(answer["token_ids"]), [float(value) for value in answer["logprobs"]["token_logprobs"]]
        if len(ids) != len(logps):
            raise RolloutError(f"the server returned {len(ids)} tokens and {len(logps)} log-probabilities", place="rollout.vllm")
        # The server reports one distribution only, the one it draws from (`--logprobs-mode processed_logprobs`).
        policy_logps = None if stop.sampling.changes_distribution else logps
        reason: Literal["stop", "length"] = "length" if answer["finish_reason"] == "length" else "stop"
        return Completion(ids, logps, stop.text(ids), reason, policy_logps)

    def _model(self, server: VllmServer) -> str:
        return server.base if self._name is None or self._merged else self._name

    def _load_weights(self) -> bool:
        """Load the current weights into the servers that do not have them; True if there was one."""
        outdated = [server for server in self._servers if self._name is not None and self._name not in server.loaded]
        for server in outdated:
            if self._merged:
                weights = {"method": "reload_weights", "kwargs": {"weights_path": str(self._folder)}}
                self._post(server, "/collective_rpc", weights)
                # Cached keys and values of prompts come from the previous weights.
                self._post(server, "/reset_prefix_cache", {})
                server.loaded.clear()
            else:
                self._post(server, "/v1/load_lora_adapter", {"lora_name": self._name, "lora_path": str(self._folder)})
            server.loaded.add(str(self._name))
        return bool(outdated)

    def _unload(self, name: str) -> None:
        for server in self._servers:
            if name in server.loaded and not self._merged:
                self._post(server, "/v1/unload_lora_adapter", {"lora_name": name})
            server.loaded.discard(name)

    def _with_restarts(self, work: Callable[[], Output]) -> Output:
        """Run `work`. If a server dies meanwhile, restart it and run `work` again from the beginning.

        Raises:
            ServerGoneError: servers died more than `max_restarts` times.
            RolloutError: a server cannot be restarted.
        """
        while True:
            try:
                return work()
            except ServerGoneError as gone:
                self._restarts += 1
                if self._restarts > self._config.max_restarts:
                    raise
                for server in self._servers:
                    if not self._healthy(server):
                        try:
                            server.restart()
                        except RolloutError as error:
                            raise error from gone

    def _healthy(self, server: VllmServer) -> bool:
        try:
            return self._client.get(f"{server.address}/health", timeout=10.0).status_code == httpx.codes.OK
        except httpx.TransportError:
            return False

    def _post(self, server: VllmServer, path: str, body: dict[str, Any]) -> Any:
        try:
            for attempt in tenacity.Retrying(
                retry=tenacity.retry_if_exception_type((httpx.NetworkError, httpx.RemoteProtocolError)),
                stop=tenacity.stop_after_attempt(self._config.retries + 1),
                wait=tenacity.wait_exponential(0.2, max=5.0),
                reraise=True,
            ):
                with attempt:
                    answer = self._client.post(f"{server.address}{path}", json=body)
        except httpx.TransportError as error:
            raise ServerGoneError(
                f"no answer to {path}: {error!r}", place=server.address, fix="see the server's log, vllm.log"
            ) from error
        if answer.is_server_error:
            raise ServerGoneError(f"{path} failed ({answer.status_code}): {answer.text[:500]}", place=server.address)
        if answer.status_code != httpx.codes.OK:
            raise RolloutError(f"{path} was refused ({answer.status_code}): {answer.text[:500]}", place=server.address)
        return answer.json() if "json" in answer.headers.get("content-type", "") else answer.text


class VllmEngine(VllmSampler):
    """Samples from the policy in training.

    Args:
        policy: the trained model.
        weights: folder through which weights are handed to the servers.
        dtype: precision of the servers, for the probe.
        merged: hand over complete merged weights instead of the adapter.
        untied: the servers were started with an output layer of its own, where the policy's is tied to the embeddings.
    """

    def __init__(
        self,
        policy: CausalLM,
        tokenizer: PreTrainedTokenizerBase,
        config: VllmConfig,
        servers: Sequence[VllmServer],
        *,
        weights: Path,
        dtype: str,
        merged: bool,
        untied: bool = False,
    ) -> None:
        super().__init__(tokenizer, policy.generation_config.eos_token_id, config, servers)
        self._policy, self._dtype, self._merged, self._version = policy, dtype, merged, 0
        self._weights, self._untied = weights, untied
        self._expected_logps = torch.empty(0)
        trained = not untied and merged and _trains_embeddings(policy)
        if trained and policy.device.type == "cpu" and policy.config.tie_word_embeddings:
            # vLLM's CPU output layer multiplies with a packed copy of the embeddings, which a reload does not update.
            raise RolloutError(
                "vLLM on a CPU cannot reload trained embeddings that are tied to the output layer",
                place="rollout.engine",
                fix="engine: local, or train an adapter",
            )
        # A server without adapters loads plain weights only, rounded once to its precision.
        self._folded = sampling_copy(policy, fold=True) if merged else None
        shutil.rmtree(weights, ignore_errors=True)

    def sync(self) -> None:
        """Load the policy's current weights into the servers.

        Raises:
            RolloutError: a server refuses them, or its log-probabilities differ from the policy's afterwards.
        """
        # A new name and a new folder each time: vLLM's prefix cache is keyed by the adapter's name, so under an old name it would
        # return keys and values of the old weights.
        before, self._version = self._name, self._version + 1
        self._name = f"{self._run}-{self._version:06d}"
        self._folder = (self._weights / self._name).resolve()
        if self._folded is None:
            save_trained(self._policy, self._tokenizer, self._folder, trained_weights(self._policy))
        else:
            self._folded.sync()
            save_for_server(self._folded.model, self._folder, untie=self._untied)
        self._expected_logps = self._probe_logps()
        # Last, because a server that wakes up takes the GPU memory that the lines above need.
        self._wake_up()
        super().sync()
        if before is not None:
            self._unload(before)

    def close(self) -> None:
        """Unload the last weights; the servers may keep running and are left awake."""
        with suppress(ServerGoneError):
            self._wake_up()
        super().close()
        shutil.rmtree(self._weights, ignore_errors=True)

    def _wake_up(self) -> None:
        """Wake up sleeping servers; they allocate their share of the GPU again.

        They share the GPU with this process and wake up only if enough of its memory is free. So everything that the next update
        recreates is freed first; weights and optimizer state stay.
        """
        if not self._asleep:
            return
        # 1. The gradients of the last update.
        self._policy.zero_grad(set_to_none=True)
        # 2. Activations in reference cycles, such as those of checkpointed layers.
        gc.collect()
        # 3. The blocks that torch caches after both: to other processes they are still allocated.
        torch.cuda.empty_cache()
        # 4. Now there is room.
        self._with_restarts(lambda: [self._post(server, "/wake_up", {}) for server in self._servers])
        self._asleep = False

    def _load_weights(self) -> bool:
        loaded = super()._load_weights()
        if loaded:
            self._check_servers()
        return loaded

    def _unload(self, name: str) -> None:
        super()._unload(name)
        shutil.rmtree(self._weights / name)

    @torch.no_grad()
    def _probe_logps(self) -> Float[torch.Tensor, " T"]:
        """Log-probabilities of a few fixed tokens under the current policy."""
        # Without sampling: the tokens are given, so one forward pass on each side is enough. [1, T] -> [T]
        batch = token_batch([PROBE_IDS[:2]], [PROBE_IDS[2:]], [0], device=self._policy.device)
        training = self._policy.training
        self._policy.eval()
        logps = completion_logprobs(self._policy, batch, temperature=1.0, layout="plain").logps[0].cpu()
        self._policy.train(training)
        return logps

    def _check_servers(self) -> None:
        """Compare the log-probabilities of the probe with those of the servers.

        The expected ones are stored at `sync`: a server may be restarted later, when the policy has already changed.
        """
        for server in self._servers:
            body = {"model": self._model(server), "prompt": PROBE_IDS, "max_tokens": 1, "temperature": 1.0, "prompt_logprobs": 0}
            # The first entry has no log-probability, the second belongs to the prompt in `_probe_logps`.
            entries = self._post(server, "/v1/completions", body)["choices"][0]["prompt_logprobs"][2:]
            found = torch.tensor([next(iter(entry.values()))["logprob"] for entry in entries])
            difference = (found - self._expected_logps).abs().mean().item()
            if not difference <= PROBE_LIMIT[self._dtype]:
                raise RolloutError(
                    f"the server does not serve the trainer's policy: their log-probabilities differ by {difference:.3g} nats",
                    place=server.address,
                    fix="restart the server with the same base weights and precision as the trainer",
                )


def _trains_embeddings(policy: CausalLM) -> bool:
    embedding: Any = policy.get_input_embeddings()
    return any(parameter.requires_grad for parameter in embedding.parameters())


def _groups(requests: Sequence[Request]) -> list[list[Request]]:
    """Requests that one call can serve: neighbours with equal prompts and consecutive seeds.

    vLLM seeds the n completions of a request with seed, seed + 1, ..., so the result is the same as of n single requests.
    """
    groups: list[list[Request]] = []
    for request in requests:
        last = groups[-1][-1] if groups else None
        if last is not None and request.prompt_ids == last.prompt_ids and _seed(request) == _seed(last) + 1:
            groups[-1].append(request)
        else:
            groups.append([request])
    return groups


def _seed(request: Request) -> int:
    return request.seed % 2**31
