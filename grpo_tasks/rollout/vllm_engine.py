"""The vLLM engine: tokens in, tokens out over HTTP, one request a completion, its own seed with it.

    sync()      adapter saved under a name of its own -> loaded -> probed -> the one before unloaded and deleted
    generate()  /v1/completions with token ids, at most `concurrency` at a time; text and finish reason by our own rules

A server that serves another policy than the trainer's would train on the wrong model without a sound: after every swap the
log-probabilities of a few tokens are compared with the trainer's.
"""

import shutil
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import repeat
from pathlib import Path
from typing import Any
from uuid import uuid4

import httpx
import tenacity
import torch
from peft import PeftModel
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from grpo_tasks.policy.batch import token_batch
from grpo_tasks.policy.chat import end_token_ids
from grpo_tasks.policy.load import save_trained
from grpo_tasks.policy.logprobs import completion_logprobs
from grpo_tasks.rollout.engine import Completion, Request, Sampling
from grpo_tasks.rollout.stop import StopRule
from grpo_tasks.rollout.vllm_server import BASE
from schemas.config import VllmConfig
from schemas.errors import RolloutError

PROBE_TOKENS = 12
PROBE_LIMIT = {"float32": 1e-3, "bfloat16": 0.15, "float16": 0.05}
"""Largest mean difference in nats between server and trainer on the probe."""


class VllmEngine:
    """Samples from servers that serve `policy`; a context manager is not needed, the servers are somebody else's.

    Args:
        policy: the trained model.
        addresses: servers that hold its base weights; requests are spread over them.
        adapters: folder for the adapters of the swaps.
        dtype: precision of the servers, for the probe.
    """

    def __init__(
        self,
        policy: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        config: VllmConfig,
        addresses: Sequence[str],
        *,
        adapters: Path,
        dtype: str,
    ) -> None:
        self._policy, self._tokenizer, self._config, self._addresses = policy, tokenizer, config, list(addresses)
        self._adapters, self._dtype = adapters, dtype
        self._end_ids = end_token_ids(tokenizer, policy.generation_config.eos_token_id)
        self._client = httpx.Client(timeout=httpx.Timeout(config.request_timeout_s, connect=10.0))
        # Nobody else's adapter on a shared server has this name, nor one of an earlier try of this stage.
        self._name, self._version, self._served = f"policy-{uuid4().hex[:8]}", 0, BASE
        shutil.rmtree(adapters, ignore_errors=True)

    def sync(self) -> None:
        """Have the servers take over the policy's present weights.

        Raises:
            RolloutError: a server refuses the adapter, or serves another policy afterwards.
        """
        if isinstance(self._policy, PeftModel):
            self._swap_adapter()
        self._probe()

    def generate(self, requests: Sequence[Request], sampling: Sampling) -> list[Completion]:
        """One completion per request, in order; see `RolloutEngine`."""
        stop = StopRule(self._tokenizer, self._end_ids | sampling.stop_token_ids, sampling)
        with ThreadPoolExecutor(self._config.concurrency) as pool:
            answers = list(pool.map(self._complete, range(len(requests)), requests, repeat(sampling)))
        return [self._completion(answer, stop) for answer in answers]

    def close(self) -> None:
        """Unload the last adapter; the servers may live on."""
        served, self._served = self._served, BASE
        self._forget(served)
        self._client.close()

    def _complete(self, number: int, request: Request, sampling: Sampling) -> dict[str, Any]:
        body = {
            "model": self._served,
            "prompt": list(request.prompt_ids),
            "max_tokens": sampling.max_completion_length,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "top_k": sampling.top_k or -1,
            "seed": request.seed % 2**31,
            "logprobs": 0,
            "return_token_ids": True,
            "stop": list(sampling.stop),
            "include_stop_str_in_output": True,
            "stop_token_ids": sorted(self._end_ids | sampling.stop_token_ids),
            "skip_special_tokens": False,
        }
        answer: dict[str, Any] = self._post(self._addresses[number % len(self._addresses)], "/v1/completions", body)["choices"][0]
        return answer

    def _completion(self, answer: dict[str, Any], stop: StopRule) -> Completion:
        ids, logps = list(answer["token_ids"]), [float(value) for value in answer["logprobs"]["token_logprobs"]]
        if len(ids) != len(logps):
            raise RolloutError(f"the server gave {len(ids)} tokens and {len(logps)} log-probabilities", place=self._addresses[0])
        return Completion(ids, logps, stop.text(ids), "length" if answer["finish_reason"] == "length" else "stop")

    def _swap_adapter(self) -> None:
        # A new name and a new folder each time: under an old name the server's prefix cache answers for the old weights.
        before, self._version = self._served, self._version + 1
        name = f"{self._name}-{self._version:06d}"
        folder = (self._adapters / name).resolve()
        save_trained(self._policy, self._tokenizer, folder)
        for address in self._addresses:
            self._post(address, "/v1/load_lora_adapter", {"lora_name": name, "lora_path": str(folder)})
        self._served = name
        self._forget(before)

    def _forget(self, name: str) -> None:
        if name == BASE:
            return
        for address in self._addresses:
            self._post(address, "/v1/unload_lora_adapter", {"lora_name": name})
        shutil.rmtree(self._adapters / name)

    @torch.no_grad()
    def _probe(self) -> None:
        """Compare the log-probabilities of a few fixed tokens."""
        ids = [3 + 7 * place % 200 for place in range(PROBE_TOKENS)]
        batch = token_batch([ids[:2]], [ids[2:]], [0], device=self._policy.device)
        training = self._policy.training
        self._policy.eval()
        wanted = completion_logprobs(self._policy, batch, temperature=1.0, layout="plain").logps[0].cpu()
        self._policy.train(training)
        body = {"model": self._served, "prompt": ids, "max_tokens": 1, "temperature": 1.0, "prompt_logprobs": 0}
        for address in self._addresses:
            given = self._post(address, "/v1/completions", body)["choices"][0]["prompt_logprobs"][2:]
            found = torch.tensor([next(iter(entry.values()))["logprob"] for entry in given])
            difference = (found - wanted).abs().mean().item()
            if not difference <= PROBE_LIMIT[self._dtype]:
                raise RolloutError(
                    f"the server serves another policy than the trainer's: {difference:.3g} nats a token apart after the swap",
                    place=address,
                    mend="restart the server; see that it was started with the same base weights and precision",
                )

    def _post(self, address: str, path: str, body: dict[str, Any]) -> Any:
        for attempt in tenacity.Retrying(
            retry=tenacity.retry_if_exception_type(httpx.TransportError),
            stop=tenacity.stop_after_attempt(self._config.retries + 1),
            wait=tenacity.wait_exponential(0.2, max=5.0),
            reraise=True,
        ):
            with attempt:
                answer = self._client.post(f"{address}{path}", json=body)
        if answer.status_code != httpx.codes.OK:
            raise RolloutError(f"{path} was refused ({answer.status_code}): {answer.text[:500]}", place=address)
        return answer.json() if "json" in answer.headers.get("content-type", "") else answer.text
