"""The vLLM engines: tokens in, tokens out over HTTP, one request for all completions of a group.

    VllmSampler   a model that stays as it is (evaluation, lab)
    VllmEngine    the policy in training:  sync()  weights saved -> servers woken up, if asleep -> taken over by them -> probed
                  -> the ones before deleted

A server that serves another policy than the trainer's would train on the wrong model without a sound: after every swap the
log-probabilities of a few tokens are compared with the trainer's. A server that dies is started again, takes over the policy,
and the whole batch is asked for again; with a seed for each completion nothing is lost and nothing counted twice.
"""

import gc
import shutil
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from itertools import cycle, repeat
from pathlib import Path
from typing import Any, TypeVar
from uuid import uuid4

import httpx
import tenacity
import torch
from transformers import PreTrainedTokenizerBase

from grpo_tasks.policy.batch import token_batch
from grpo_tasks.policy.chat import end_token_ids
from grpo_tasks.policy.folded_adapter import CausalLM
from grpo_tasks.policy.load import save_trained, trained_weights
from grpo_tasks.policy.logprobs import completion_logprobs
from grpo_tasks.policy.sharded import sampling_copy
from grpo_tasks.rollout.engine import Completion, Request, Sampling
from grpo_tasks.rollout.stop import StopRule
from grpo_tasks.rollout.vllm_server import VllmServer, authorization
from schemas.config.rollout import VllmConfig
from schemas.errors import RolloutError, ServerGoneError

PROBE_IDS = [3 + 7 * place % 200 for place in range(12)]
PROBE_LIMIT = {"float32": 1e-3, "bfloat16": 0.15, "float16": 0.05}
"""Largest mean difference in nats between server and trainer on the probe."""

Made = TypeVar("Made")


class VllmSampler:
    """Samples from servers that all serve the same model.

    Args:
        tokenizer: the model's.
        generation_eos: end tokens of the model's generation config.
        config: limits and retries.
        servers: requests are spread over them; they are somebody else's to end.
        adapter: PEFT folder to put on the servers' base; none: the base itself.
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
        # Nobody else's adapter on a shared server has this name, nor one of an earlier try of this stage.
        self._run = f"policy-{uuid4().hex[:8]}"
        self._name: str | None = None if adapter is None else self._run
        self._folder = adapter

    def sync(self) -> None:
        """Have the servers take over the adapter."""
        self._lasting(self._take_over)

    def generate(self, requests: Sequence[Request], sampling: Sampling) -> list[Completion]:
        """One completion per request, in order; see `RolloutEngine`.

        Raises:
            RolloutError: a server refuses, or died more often than it is started again.
        """
        stop = StopRule(self._tokenizer, self._end_ids | sampling.stop_token_ids, sampling)
        return [self._completion(answer, stop) for answer in self._lasting(lambda: self._answers(requests, stop))]

    def sleep(self) -> None:
        """Give the card's memory back until the next `sync`, where configured."""
        if self._config.sleep:
            for server in self._servers:
                self._post(server, "/sleep?level=1", {})
            self._asleep = True

    def close(self) -> None:
        """Unload the adapter; the servers may live on."""
        # From a server that is gone there is nothing to unload, and the work is done.
        with suppress(ServerGoneError):
            if self._name is not None:
                self._forget(self._name)
        self._client.close()

    def _answers(self, requests: Sequence[Request], stop: StopRule) -> list[dict[str, Any]]:
        self._take_over()
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
            "seed": _seed(group[0]),
            "logprobs": 0,
            "return_token_ids": True,
            "stop": list(sampling.stop),
            "include_stop_str_in_output": True,
            "stop_token_ids": sorted(stop.end_ids),
            # The server searches for stop strings in the text that it decodes: it has to be the text we search.
            "skip_special_tokens": not stop.reads_special_tokens,
        }
        answers: list[dict[str, Any]] = self._post(server, "/v1/completions", body)["choices"]
        if len(answers) != len(group):
            raise RolloutError(f"a server gave {len(answers)} completions for {len(group)}", place=server.address)
        if any(answer.get("token_ids") is None for answer in answers):
            raise RolloutError("this vLLM returns no token ids", place=server.address, fix="vLLM 0.32 is known to work")
        return sorted(answers, key=lambda answer: int(answer["index"]))

    def _completion(self, answer: dict[str, Any], stop: StopRule) -> Completion:
        ids, logps = list(answer["token_ids"]), [float(value) for value in answer["logprobs"]["token_logprobs"]]
        if len(ids) != len(logps):
            raise RolloutError(f"a server gave {len(ids)} tokens and {len(logps)} log-probabilities", place="rollout.vllm")
        return Completion(ids, logps, stop.text(ids), "length" if answer["finish_reason"] == "length" else "stop")

    def _model(self, server: VllmServer) -> str:
        return server.base if self._name is None or self._merged else self._name

    def _take_over(self) -> bool:
        """Have every server hold the present weights; whether one did not yet."""
        late = [server for server in self._servers if self._name is not None and self._name not in server.loaded]
        for server in late:
            if self._merged:
                weights = {"method": "reload_weights", "kwargs": {"weights_path": str(self._folder)}}
                self._post(server, "/collective_rpc", weights)
                self._post(server, "/reset_prefix_cache", {})
                server.loaded.clear()
            else:
                self._post(server, "/v1/load_lora_adapter", {"lora_name": self._name, "lora_path": str(self._folder)})
            server.loaded.add(str(self._name))
        return bool(late)

    def _forget(self, name: str) -> None:
        for server in self._servers:
            if name in server.loaded and not self._merged:
                self._post(server, "/v1/unload_lora_adapter", {"lora_name": name})
            server.loaded.discard(name)

    def _lasting(self, work: Callable[[], Made]) -> Made:
        """`work`, again from its beginning when a server died meanwhile and has been started anew."""
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
                f"{path} has no answer: {error!r}", place=server.address, fix="see its log, vllm.log"
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
        weights: folder for the weights of the swaps.
        dtype: precision of the servers, for the probe.
        merged: whether whole weights are handed over, not the adapter.
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
    ) -> None:
        super().__init__(tokenizer, policy.generation_config.eos_token_id, config, servers)
        self._policy, self._dtype, self._merged, self._version = policy, dtype, merged, 0
        self._weights = weights
        self._wanted = torch.empty(0)
        embedding: Any = policy.get_input_embeddings()
        if merged and policy.device.type == "cpu" and policy.config.tie_word_embeddings and embedding.weight.requires_grad:
            # Its output layer multiplies with a packed copy of the embeddings that a reload leaves as it was.
            raise RolloutError(
                "vLLM on a CPU does not take over trained embeddings that are also the output layer",
                place="rollout.engine",
                fix="engine: local, or train an adapter",
            )
        self._folded = sampling_copy(policy) if merged else None
        shutil.rmtree(weights, ignore_errors=True)

    def sync(self) -> None:
        """Have the servers take over the policy's present weights.

        Raises:
            RolloutError: a server refuses them, or serves another policy afterwards.
        """
        # A new name and a new folder each time: under an old name the server's prefix cache answers for the old weights.
        before, self._version = self._name, self._version + 1
        self._name = f"{self._run}-{self._version:06d}"
        self._folder = (self._weights / self._name).resolve()
        if self._folded is None:
            save_trained(self._policy, self._tokenizer, self._folder, trained_weights(self._policy))
        else:
            self._folded.sync()
            self._folded.model.save_pretrained(str(self._folder))
        self._wanted = self._probe_logps()
        # Only now: what is above needs memory of the card, which the server takes when it wakes up.
        self._wake_up()
        super().sync()
        if before is not None:
            self._forget(before)

    def close(self) -> None:
        """Unload the last weights; the servers may live on, and do so awake."""
        with suppress(ServerGoneError):
            self._wake_up()
        super().close()
        shutil.rmtree(self._weights, ignore_errors=True)

    def _wake_up(self) -> None:
        """Have servers that sleep take their share of the card again.

        They share it with this process, and start only when enough of it is free. So first everything goes that the next update
        makes anew; weights and the optimizer's state stay.
        """
        if not self._asleep:
            return
        # 1. The gradients of the last update.
        self._policy.zero_grad(set_to_none=True)
        # 2. Activations that are held by cycles of references, such as those of checkpointed layers.
        gc.collect()
        # 3. What both leave behind: to other processes the blocks that torch keeps for itself are taken.
        torch.cuda.empty_cache()
        # 4. Now there is room.
        self._lasting(lambda: [self._post(server, "/wake_up", {}) for server in self._servers])
        self._asleep = False

    def _take_over(self) -> bool:
        late = super()._take_over()
        if late:
            self._probe()
        return late

    def _forget(self, name: str) -> None:
        super()._forget(name)
        shutil.rmtree(self._weights / name)

    @torch.no_grad()
    def _probe_logps(self) -> torch.Tensor:
        """log-probabilities of a few fixed tokens under the present policy."""
        batch = token_batch([PROBE_IDS[:2]], [PROBE_IDS[2:]], [0], device=self._policy.device)
        training = self._policy.training
        self._policy.eval()
        logps = completion_logprobs(self._policy, batch, temperature=1.0, layout="plain").logps[0].cpu()
        self._policy.train(training)
        return logps

    def _probe(self) -> None:
        """Compare them with those of the servers; the policy itself may be in training meanwhile."""
        for server in self._servers:
            body = {"model": self._model(server), "prompt": PROBE_IDS, "max_tokens": 1, "temperature": 1.0, "prompt_logprobs": 0}
            given = self._post(server, "/v1/completions", body)["choices"][0]["prompt_logprobs"][2:]
            found = torch.tensor([next(iter(entry.values()))["logprob"] for entry in given])
            difference = (found - self._wanted).abs().mean().item()
            if not difference <= PROBE_LIMIT[self._dtype]:
                raise RolloutError(
                    f"the server serves another policy than the trainer's: {difference:.3g} nats a token apart after the swap",
                    place=server.address,
                    fix="restart the server; see that it was started with the same base weights and precision",
                )


def _groups(requests: Sequence[Request]) -> list[list[Request]]:
    """Neighbours with one prompt and seeds that count upwards, which is how vLLM seeds the n completions of a request."""
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
