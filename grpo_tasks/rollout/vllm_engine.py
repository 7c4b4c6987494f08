"""The vLLM engines: token ids in, token ids out over HTTP, one request for all completions of a group.

A server that kept old weights would train on completions of the wrong policy without any error. So each shows first that it takes
weights over, and after each load the probe is compared (calibration.py). The pool hands out requests.
"""

import gc
import shutil
import time
import warnings
from collections.abc import Callable, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from threading import Condition, Lock
from typing import Any, Literal
from uuid import uuid4

import torch
from jaxtyping import Float
from peft import PeftModel
from transformers import PreTrainedTokenizerBase

from grpo_tasks.content.tokenizer import end_token_ids
from grpo_tasks.kit.progress import Count
from grpo_tasks.kit.share import Pool
from grpo_tasks.policy.folded_adapter import CausalLM
from grpo_tasks.policy.load import save_for_server, save_trained, trained_weights
from grpo_tasks.policy.sharded import sampling_copy
from grpo_tasks.policy.text_tower import rename_keys
from grpo_tasks.rollout import calibration
from grpo_tasks.rollout.calibration import NAMINGS, Shifted
from grpo_tasks.rollout.engine import Completion, EngineReport, Request, Sampling
from grpo_tasks.rollout.stop import StopRule
from grpo_tasks.rollout.vllm_server import Calibrated, Client, UnknownError, VllmServer, authorization, deliver, withdraw
from schemas.config.rollout import VllmConfig
from schemas.errors import Notice, RolloutError, ServerGoneError
from schemas.metrics import SYNC_BYTES, SYNC_TIME

COMPLETIONS = "/v1/completions"
LIKE_SHIFT = 0.1
"""Mean |shift| (nats per token) that a server must show on large weights where no trainer is. They move it by some nats."""


@dataclass(frozen=True, slots=True)
class Weights:
    """A policy on its way to the servers, written in `seconds`."""

    name: str
    """Unlike that of any other policy: under an old name vLLM's prefix cache would return keys and values of old weights."""
    folder: Path
    logps: Float[torch.Tensor, " T"] | None = None
    """Log-probabilities (nats) of the probe under this policy; None: it is not verified."""
    seconds: float = 0.0

    @property
    def num_bytes(self) -> int:
        """Of all files."""
        return sum(file.stat().st_size for file in self.folder.rglob("*") if file.is_file())


class VllmSampler:
    """Samples from servers that all serve the same model; the caller ends them.

    `generation_eos` is that of the model's generation config. `adapter` is the folder of a PEFT adapter to load on the servers'
    base model; None samples from the base. The folder `scratch` is for weights that they load besides, and is deleted in the end.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        generation_eos: int | Sequence[int] | None,
        config: VllmConfig,
        servers: Sequence[VllmServer],
        adapter: Path | None = None,
        *,
        scratch: Path,
    ) -> None:
        self._tokenizer, self._config = tokenizer, config
        self._end_ids = end_token_ids(tokenizer, generation_eos)
        self._client = Client(authorization(), timeout_s=config.request_timeout_s, retries=config.retries)
        self._merged = False
        # A unique name: on a shared server it collides neither with other users' adapters nor with those of an earlier attempt.
        self._run = f"policy-{uuid4().hex[:8]}"
        self._present = None if adapter is None else Weights(self._run, adapter)
        """What the servers have to serve; None: their base model."""
        self._scratch, self._ids = scratch.resolve(), calibration.probe_ids(config.max_model_len)
        self._naming, self._known = NAMINGS[0], False
        """How the servers' model names its layers, one of `NAMINGS`, and whether a server has proved it."""
        self._named: dict[str, Path] = {}
        """Folders of weights whose keys have these names, by the weights' names."""
        self._lock = Lock()
        self.pool = Pool(
            servers,
            concurrency=config.concurrency,
            admit=lambda server: self._hand_over(server, self._present),
            repair=self._repair,
            max_failures=config.max_restarts,
            patience_s=config.patience_s,
        )

    def sync(self) -> None:
        """Load the adapter into the servers; RolloutError when none took it."""
        self.pool.refresh()

    def generate(self, requests: Sequence[Request], sampling: Sampling) -> list[Completion]:
        """One completion per request, in order; RolloutError where a server refuses one, or each failed too often."""
        stop = StopRule.of(self._tokenizer, self._end_ids, sampling)
        groups, count = groups_of(requests), Count("sampling", len(requests), "completions")

        def counted(answer: list[dict[str, Any]]) -> int:
            tokens = sum(len(one["token_ids"]) for one in answer)
            count.add(len(answer), tokens=tokens)
            return tokens

        answers = self.pool.run(groups, lambda server, group: self._complete(server, group, stop), tokens=counted)
        return [_completion(answer, stop) for group in answers for answer in group]

    def sleep(self) -> None:
        """Release the GPU memory of the servers until the next `sync`, if `rollout.vllm.sleep` is on."""
        for server in self.pool.running() if self._config.sleep else ():
            try:
                self._post(server, "/sleep?level=1", {})
                server.asleep = True
            except ServerGoneError as gone:
                self.pool.take_out(server, gone)

    def report(self) -> EngineReport:
        """Figures and events of the pool since the last report."""
        return EngineReport(*self.pool.take_report())

    def close(self) -> None:
        """Unload what was loaded; the servers may keep running."""
        for server in self.pool.serving:
            # A server that is gone has nothing to unload, and all completions have been delivered.
            with suppress(ServerGoneError):
                self._unload(server, keep=None)
        for replica in self.pool.replicas:
            # It has shown how it takes over the keys of this policy; another policy may have others.
            replica.server.calibrated = None
        self._client.close()
        shutil.rmtree(self._scratch, ignore_errors=True)

    def _complete(self, server: VllmServer, group: Sequence[Request], stop: StopRule) -> list[dict[str, Any]]:
        sampling = stop.sampling
        body = {
            "model": server.base if self._present is None or self._merged else self._present.name,
            "prompt": list(group[0].prompt_ids),
            "n": len(group),
            "max_tokens": min(sampling.max_completion_length, group[0].max_tokens or sampling.max_completion_length),
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "top_k": sampling.top_k or -1,
            "min_p": sampling.min_p,
            "repetition_penalty": sampling.repetition_penalty,
            "seed": _server_seed(group[0]),
            "logprobs": 0,
            "return_token_ids": True,
            "stop": list(sampling.stop),
            "include_stop_str_in_output": True,
            "stop_token_ids": sorted(stop.end_ids),
            # The server searches for stop strings in the text that it decodes. It must decode as `StopRule` does.
            "skip_special_tokens": not stop.reads_special_tokens,
        }
        answers: list[dict[str, Any]] = self._post(server, COMPLETIONS, body)["choices"]
        if len(answers) != len(group):
            raise RolloutError(f"the server returned {len(answers)} completions, not {len(group)}", place=server.address)
        if any(answer.get("token_ids") is None for answer in answers):
            raise RolloutError(
                "this version of vLLM returns no token ids",
                place=server.address,
                fix="use vLLM 0.32 or another that returns them",
            )
        return sorted(answers, key=lambda answer: int(answer["index"]))

    def _hand_over(self, server: VllmServer, weights: Weights | None) -> None:
        """Load weights into a server that has shown that it takes weights over; nothing to do for one that has them."""
        if server.asleep:
            self._post(server, "/wake_up", {})
            server.asleep = False
        if server.stale:
            # It was away, and somebody may have restarted it: which of our adapters does it still have?
            server.inspect()
            # Nobody can ask for the weights of the base model, so they are loaded again.
            server.loaded &= set() if self._merged else self._client.models(server.address)
            server.stale, server.calibrated = False, None
        if weights is None:
            return
        if server.calibrated is None:
            self._calibrate(server, weights)
        if weights.name not in server.loaded:
            self._load(server, weights, self._folder(weights))
            server.bytes_taken += weights.num_bytes

    def _load(self, server: VllmServer, weights: Weights, folder: Path) -> None:
        where = str(folder)
        if server.receiver is not None:
            where = deliver(self._client, server.receiver, weights.name, folder)
        if self._merged:
            self._post(server, "/collective_rpc", {"method": "reload_weights", "kwargs": {"weights_path": where}})
            # Cached keys and values of prompts come from the previous weights.
            self._post(server, "/reset_prefix_cache", {})
            self._unload(server, keep=None)
        else:
            self._post(server, "/v1/load_lora_adapter", {"lora_name": weights.name, "lora_path": where})
        server.loaded.add(weights.name)

    def _folder(self, weights: Weights) -> Path:
        """Where weights are whose keys have the names of the servers' model."""
        with self._lock:
            if self._naming is None:
                return weights.folder
            if weights.name not in self._named:
                # The policy's own folder, which nobody else reads; an adapter that is evaluated belongs to somebody.
                own = weights.folder.is_relative_to(self._scratch)
                folder = weights.folder if own else shutil.copytree(weights.folder, self._scratch / "renamed")
                rename_keys(folder, self._naming)
                self._named[weights.name] = folder
            return self._named[weights.name]

    def _calibrate(self, server: VllmServer, weights: Weights) -> None:
        """Find out whether a server takes over an adapter with these keys, and under which names; RolloutError: under none."""
        base = self._probe(server, server.base)
        with self._lock:
            like = Weights(f"{self._run}-calibration", self._scratch / "calibration")
            if not like.folder.exists():
                calibration.write_like(weights.folder, like.folder)

        def fault(found: Float[torch.Tensor, " T"]) -> str | None:
            moved = float((found - base).abs().mean())
            return None if moved > LIKE_SHIFT else "it answers as its base model does, though the weights are large"

        self._find_naming(server, like, fault)
        server.calibrated = Calibrated(base, 0.0)

    def _find_naming(
        self, server: VllmServer, trial: Weights, fault_of: Callable[[Float[torch.Tensor, " T"]], str | None]
    ) -> None:
        """Let a server load calibration weights under the names that others have proved, or else under one after the other."""
        faults: list[str] = []
        # One server after the other until one has proved a naming: they serve the same model.
        with nullcontext() if self._known else self._lock:
            likely = [self._naming] if self._known else calibration.likely_namings(trial.folder, server.model)
            # Complete weights with names that it does not know end vLLM's engine, so the likeliest has to do.
            for naming in likely[:1] if self._merged else likely:
                fault = self._try(server, trial, naming, fault_of)
                if fault is None:
                    self._naming, self._known = naming, True
                    return
                faults.append(fault)
        raise RolloutError(
            f"the server does not take over the policy: {faults[0]}. {calibration.without_match(trial.folder, server.model)}",
            place=server.address,
            fix="start it with the model and precision of section model, without --lora-target-modules, and with a vLLM that "
            "serves adapters of this architecture; or rollout.vllm.sync: merged, or rollout.engine: local",
        )

    def _try(
        self,
        server: VllmServer,
        trial: Weights,
        naming: str | None,
        fault_of: Callable[[Float[torch.Tensor, " T"]], str | None],
    ) -> str | None:
        """What is wrong with what a server makes of calibration weights under a naming; it unloads them again."""
        number = NAMINGS.index(naming)
        weights = replace(trial, name=f"{trial.name}-{number}")
        folder = trial.folder.with_name(weights.name) if naming else trial.folder
        if not folder.exists():
            shutil.copytree(trial.folder, folder)
            rename_keys(folder, naming)
        try:
            self._load(server, weights, folder)
            return fault_of(self._probe(server, server.base if self._merged else weights.name))
        except ServerGoneError:
            raise
        except RolloutError as refusal:
            return refusal.message
        finally:
            if weights.name in server.loaded:
                with suppress(ServerGoneError):
                    self._forget(server, weights.name)

    def _probe(self, server: VllmServer, model: str) -> Float[torch.Tensor, " T"]:
        """Log-probabilities (nats) of the probe under a model of a server."""
        body = {"model": model, "prompt": self._ids, "max_tokens": 1, "temperature": 1.0, "prompt_logprobs": 0}
        # The first entry has no log-probability, the second belongs to the prompt in `probe_logps`.
        entries = self._post(server, COMPLETIONS, body)["choices"][0]["prompt_logprobs"][2:]
        return torch.tensor([float(next(iter(entry.values()))["logprob"]) for entry in entries])

    def _unload(self, server: VllmServer, *, keep: str | None) -> None:
        """Unload all adapters of ours but one."""
        for name in sorted(server.loaded - {keep}):
            self._forget(server, name)

    def _forget(self, server: VllmServer, name: str) -> None:
        if not self._merged:
            self._post(server, "/v1/unload_lora_adapter", {"lora_name": name})
        if server.receiver is not None:
            withdraw(self._client, server.receiver, name)
        server.loaded.discard(name)

    def _repair(self, server: VllmServer) -> None:
        server.stale = True
        if not self._client.healthy(server.address):
            server.restart()

    def _post(self, server: VllmServer, path: str, body: dict[str, Any]) -> Any:
        sampled = path == COMPLETIONS
        try:
            # A server of somebody else that was restarted has its first weights under the name of the merged ones. So there is no
            # second attempt: the pool loads the policy again first.
            return self._client.post(server.address, path, body, repeat=not (sampled and self._merged))
        except UnknownError as error:
            if sampled and self._present is not None and not self._merged:
                raise ServerGoneError(f"the server has lost the policy: {error.message}", place=server.address) from error
            raise


class VllmEngine(VllmSampler):
    """Samples from `policy` in training: `prepare` saves its weights into the folder `weights`, `load` hands them to the servers.

    `dtype` is the precision of the servers, for the probe. `merged` hands over complete weights instead of the adapter, and
    `untied` says that the servers' output layer is one of its own where the policy's is tied. With `shared` other processes
    sample from the same servers: merged weights are then compared and not calibrated, because the others would sample from the
    calibration.
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
        shared: bool = False,
    ) -> None:
        super().__init__(tokenizer, policy.generation_config.eos_token_id, config, servers, scratch=weights)
        self._ids = calibration.probe_ids(
            config.max_model_len, getattr(policy.config.get_text_config(), "max_position_embeddings", None)
        )
        self._policy, self._dtype, self._merged, self._version = policy, dtype, merged, 0
        self._untied, self._shared = untied, shared
        self._calibration: tuple[Weights, Shifted] | None = None
        """Calibration weights as the servers get them, and what they change in the trainer's probe."""
        self._sync_s = 0.0
        self._turn, self._sampling, self._repairs = Condition(), False, 0
        """Whether the card is the servers' at present, from a load to `sleep`, and how many of them are being repaired on it."""
        embedding: Any = policy.get_input_embeddings()
        tied = merged and not untied and policy.config.tie_word_embeddings
        if tied and policy.device.type == "cpu" and any(parameter.requires_grad for parameter in embedding.parameters()):
            # vLLM's CPU output layer multiplies with a packed copy of the embeddings, which a reload does not update.
            raise RolloutError(
                "vLLM on a CPU cannot reload trained embeddings that are tied to the output layer",
                place="rollout.engine",
                fix="engine: local, or train an adapter",
            )
        if merged and dtype != "float32":
            better = "rollout.vllm.sync: adapter" if isinstance(policy, PeftModel) else "model.dtype: float32"
            warnings.warn(
                f"the servers load merged weights in {dtype}, which rounds small updates away: they sample from a policy that is "
                f"behind the trainer's (sampling/kl). fix: {better}",
                Notice,
                stacklevel=2,
            )
        # A server without adapters loads plain weights only, rounded once to its precision.
        self._folded = sampling_copy(policy, fold=True) if merged else None
        shutil.rmtree(weights, ignore_errors=True)

    def sync(self) -> None:
        """Load the policy's current weights into the servers; see `load`."""
        self.load(self.prepare())

    def prepare(self) -> Weights:
        """Save the policy's current weights for `load`; the policy may then be trained on."""
        began, self._version = time.perf_counter(), self._version + 1
        if self._calibration is None:
            with calibration.calibrated(self._policy, self._ids, self._dtype) as shifted:
                # Kept to the end, for servers that are restarted or join later.
                self._calibration = self._saved("calibration"), shifted
        return replace(self._saved(f"{self._version:06d}"), seconds=time.perf_counter() - began)

    def _saved(self, name: str) -> Weights:
        """The policy's present weights in a folder of their own."""
        name = f"{self._run}-{name}"
        folder = self._scratch / name
        if self._folded is None:
            save_trained(self._policy, self._tokenizer, folder, trained_weights(self._policy))
            return Weights(name, folder, calibration.probe_logps(self._policy, self._ids))
        self._folded.sync()
        save_for_server(self._folded.model, folder, untie=self._untied)
        # What the server gets: in 16 bits the sum of base and adapter is rounded. Without an adapter the copy is the policy.
        served = self._folded.model if isinstance(self._policy, PeftModel) else self._policy
        return Weights(name, folder, calibration.probe_logps(served, self._ids))

    def load(self, weights: Weights) -> None:
        """Load prepared weights, and delete the previous ones; RolloutError where no server takes them and shows that it does."""
        began, before = time.perf_counter(), self._present
        self._present = weights
        for replica in self.pool.replicas:
            replica.server.bytes_taken = 0
        if self._config.sleep:
            # Servers wake up, and those that have died meanwhile are started again.
            self._make_room()
        self._let_sample()
        self.pool.refresh()
        if before is not None:
            # An immutable folder for each policy: vLLM's engine dies when it reads an adapter whose files were deleted.
            shutil.rmtree(before.folder)
            self._named.pop(before.name, None)
        self._sync_s = weights.seconds + time.perf_counter() - began

    def generate(self, requests: Sequence[Request], sampling: Sampling) -> list[Completion]:
        """As above; the card is the servers' until `sleep`."""
        self._let_sample()
        return super().generate(requests, sampling)

    def sleep(self) -> None:
        """As above; from now on the card is the trainer's: a server that fails on it is started again after the next load."""
        with self._turn:
            self._sampling = False
            self._turn.wait_for(lambda: not self._repairs)
        super().sleep()

    def report(self) -> EngineReport:
        """Those of the pool and of the last load."""
        report = super().report()
        taken = sum(replica.server.bytes_taken for replica in self.pool.replicas)
        return EngineReport(report.figures | {SYNC_TIME: self._sync_s, SYNC_BYTES: float(taken)}, report.events)

    def close(self) -> None:
        """Unload the last weights; the servers may keep running and are left awake."""
        for server in self.pool.serving:
            if server.asleep:
                self._make_room()
                with suppress(ServerGoneError):
                    self._post(server, "/wake_up", {})
        super().close()

    def _let_sample(self) -> None:
        with self._turn:
            self._sampling = True
            self._turn.notify_all()

    def _repair(self, server: VllmServer) -> None:
        if not server.on_trainers_card:
            super()._repair(server)
            return
        with self._turn:
            # In an update there is no room for it, and where servers sleep it would be awake in the middle of one.
            self._turn.wait_for(lambda: self._sampling)
            self._repairs += 1
        try:
            # vLLM starts only if its whole share of the card is free. No gradients: this is not the trainer's thread.
            _free_cache()
            super()._repair(server)
        finally:
            with self._turn:
                self._repairs -= 1
                self._turn.notify_all()

    def _make_room(self) -> None:
        """Free what the next update recreates: a server that sleeps on this card wakes up only if enough memory is free."""
        self._policy.zero_grad(set_to_none=True)
        _free_cache()

    def _hand_over(self, server: VllmServer, weights: Weights | None) -> None:
        assert weights is not None
        assert weights.logps is not None
        super()._hand_over(server, weights)
        assert server.calibrated is not None
        assert self._calibration is not None
        # What the weights change in the probe, there and here. Here it is that of the moment when they were saved: the policy may
        # have changed since.
        found = self._probe(server, server.base if self._merged else weights.name) - server.calibrated.base
        wanted = weights.logps - self._calibration[1].base
        if fault := calibration.shift_fault(found, wanted, noise=server.calibrated.noise, share=calibration.POLICY_SHARE):
            raise RolloutError(
                f"the server does not serve the trainer's policy: {fault}",
                place=server.address,
                fix="restart the server with the same base weights and precision as the trainer",
            )
        self._unload(server, keep=weights.name)

    def _calibrate(self, server: VllmServer, weights: Weights) -> None:  # noqa: ARG002 - the calibration has been saved already
        """As above, by the trainer's shift on calibration weights; RolloutError where the base is another model, too."""
        assert self._calibration is not None
        (trial, wanted), dtype = self._calibration, self._dtype
        assert trial.logps is not None
        shift = trial.logps - wanted.base
        base = self._probe(server, server.base)
        difference = float((base - wanted.base).abs().mean())
        noise = calibration.noise_of(base, wanted.base, dtype)
        if self._merged:
            # Nobody can ask for its base again, and what it serves now may be the weights of an earlier attempt.
            base = wanted.base
            noise = noise if difference <= calibration.BASE_LIMIT[dtype] else 4 * calibration.LEAST_NOISE[dtype]
        elif not difference <= calibration.BASE_LIMIT[dtype]:
            raise RolloutError(
                f"the server does not serve the trainer's base model: their log-probabilities differ by {difference:.3g} nats",
                place=server.address,
                fix="restart the server with the same base weights and precision as the trainer",
            )

        def fault(found: Float[torch.Tensor, " T"]) -> str | None:
            return calibration.shift_fault(found - base, shift, noise=noise, share=calibration.CALIBRATION_SHARE[dtype])

        if not (self._merged and self._shared):
            self._find_naming(server, trial, fault)
        server.calibrated = Calibrated(base, noise)


def _free_cache() -> None:
    """Give back the memory of the card that torch keeps in reserve: to other processes it is still allocated."""
    # First the activations in reference cycles, such as those of checkpointed layers.
    gc.collect()
    torch.cuda.empty_cache()


def _completion(answer: dict[str, Any], stop: StopRule) -> Completion:
    ids, logps = list(answer["token_ids"]), [float(value) for value in answer["logprobs"]["token_logprobs"]]
    if len(ids) != len(logps):
        raise RolloutError(f"the server returned {len(ids)} tokens and {len(logps)} log-probabilities", place="rollout.vllm")
    # The server reports one distribution only, the one it draws from (`--logprobs-mode processed_logprobs`).
    policy_logps = None if stop.sampling.changes_distribution else logps
    reason: Literal["stop", "length"] = "length" if answer["finish_reason"] == "length" else "stop"
    return Completion(ids, logps, stop.text(ids), reason, policy_logps)


def groups_of(requests: Sequence[Request]) -> list[list[Request]]:
    """Requests that one call to a server can answer: neighbours with equal prompts and limits, and consecutive seeds."""
    groups: list[list[Request]] = []
    for request in requests:
        last = groups[-1][-1] if groups else None
        alike = last is not None and (request.prompt_ids, request.max_tokens) == (last.prompt_ids, last.max_tokens)
        if last is not None and alike and _server_seed(request) == _server_seed(last) + 1:
            groups[-1].append(request)
        else:
            groups.append([request])
    return groups


def _server_seed(request: Request) -> int:
    """As vLLM takes it."""
    return request.seed % 2**31
