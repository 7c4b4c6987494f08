"""When rounds are sampled: each when it is needed, or some of them ahead, by a policy of bounded age.

    max_staleness 0     sample 1 | train 1 | sample 2 | train 2 | ...
    max_staleness 1     train 1 | train 2 | train 3 | ...                  round n + 1 is sampled by the policy that enters
                        sample 2 | sample 3 | sample 4 | ...               the training on round n

With a bound of K the round that is K updates ahead is started, from weights that are saved before the policy is trained on. A
thread loads those weights into the servers and samples, one round after the other. So which policy samples a round depends on
the round's number and on the barriers below, and never on how fast anything is: a stage that is run again ends in the same bytes.

Checkpoints hold no round in flight. Where one is due, and where held-out prompts are evaluated, nothing is started beyond that
update (the barrier), so nothing is in flight there. A resumed stage starts again from it as the first one did.
"""

import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace

from grpo_tasks.grpo.rounds import Collector, Round
from grpo_tasks.rollout.engine import EngineReport
from grpo_tasks.rollout.vllm_engine import VllmEngine, Weights
from schemas.metrics import POLICY_LAG, SAMPLER_WAIT, TRAINER_WAIT


class Rounds:
    """Rounds in their order.

    Args:
        collector: samples a round.
        updates: updates that train on a round.
        max_staleness: see `rollout.max_staleness`; above 0 for a `VllmEngine` only.
        may_start: whether the round that begins after this many updates may be started before they were made.
    """

    def __init__(self, collector: Collector, *, updates: int, max_staleness: int, may_start: Callable[[int], bool]) -> None:
        self._collector, self._updates, self._may_start = collector, updates, may_start
        self.ahead = max_staleness // updates
        """Rounds that are sampled while the policy trains on an earlier one."""
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="rollout")
        self._started: dict[int, Future[Round]] = {}
        self._loaded: Weights | None = None
        self._ended: float | None = None
        """When (s) the last round was sampled."""

    def take(self, number: int) -> Round:
        """Round `number`, counted from 0; starts later ones. The policy has had all updates of the rounds before it."""
        if not self.ahead:
            began = time.perf_counter()
            # The engine takes over the weights first: sampled from any others the update would be off-policy.
            self._collector.engine.sync()
            current = self._sample(number, number * self._updates)
        else:
            self._start(number)
            began = time.perf_counter()
            current = self._started.pop(number).result()
        lag = number * self._updates - current.version
        assert lag <= self.ahead * self._updates
        if not isinstance(self._collector.engine, VllmEngine):
            return current
        waits = {TRAINER_WAIT: time.perf_counter() - began, POLICY_LAG: float(lag)}
        return replace(current, report=EngineReport(current.report.figures | waits, current.report.events))

    def drop(self) -> None:
        """Discard the rounds in flight: their weights were rolled back."""
        # Waited for and not cancelled: which of them move the adaptive reward weights must not depend on how far they are.
        for future in self._started.values():
            future.result()
        self._started.clear()

    def close(self) -> None:
        """Wait for a round that is still being sampled, as long as its engine and its reward functions are there."""
        self._thread.shutdown(cancel_futures=True)

    def _start(self, number: int) -> None:
        """Start round `number`, if it was not started ahead, and those ahead of it, all from the present weights."""
        wanted = [number]
        for later in range(number + 1, number + self.ahead + 1):
            if not self._may_start(later * self._updates):
                break
            wanted.append(later)
        missing = [each for each in wanted if each not in self._started]
        if not missing:
            return
        engine = self._collector.engine
        assert isinstance(engine, VllmEngine)
        # In this thread: the weights must not change while they are saved.
        weights = engine.prepare()
        for each in missing:
            self._started[each] = self._thread.submit(self._load_and_sample, weights, each, number * self._updates)

    def _load_and_sample(self, weights: Weights, number: int, version: int) -> Round:
        engine = self._collector.engine
        assert isinstance(engine, VllmEngine)
        if weights is not self._loaded:
            engine.load(weights)
            self._loaded = weights
        return self._sample(number, version)

    def _sample(self, number: int, version: int) -> Round:
        began = time.perf_counter()
        waited = 0.0 if self._ended is None else began - self._ended
        current = self._collector.sample(number, step=number * self._updates + 1, version=version)
        self._ended = time.perf_counter()
        report = current.report
        if isinstance(self._collector.engine, VllmEngine):
            report = EngineReport(report.figures | {SAMPLER_WAIT: waited}, report.events)
        return replace(current, report=report)
