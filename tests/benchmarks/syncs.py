"""False alarms of the comparison between server and trainer: a thousand policies, each loaded by a real vLLM server and compared.

    python -m tests.benchmarks.syncs

The embedded model in bfloat16 with an adapter that drifts, once slowly and once fast. Printed: alarms, and from which shift on an
adapter that does nothing would have been found.
"""

import tempfile
from pathlib import Path

import torch

from grpo_tasks.policy.load import load_tokenizer, trainable_policy
from grpo_tasks.rollout.calibration import POLICY_SHARE, shift_fault
from grpo_tasks.rollout.vllm_engine import VllmEngine, Weights
from grpo_tasks.rollout.vllm_server import ServerModel, VllmServer, serving
from schemas.config.model import ModelConfig
from schemas.config.rollout import VllmConfig
from schemas.paths import resolve
from schemas.results.model import ModelRef

BASE, DTYPE, SYNCS = ModelRef(path="embedded:base"), "bfloat16", 1000


class Watched(VllmEngine):
    """Counts instead of refusing."""

    alarms = 0
    found_from: float | None = None

    def _check(self, server: VllmServer, weights: Weights) -> None:
        assert server.calibrated is not None
        assert self._calibration is not None
        assert weights.logps is not None
        known, wanted = server.calibrated, weights.logps - self._calibration[1].base
        found = self._probe(server, weights.name) - known.base
        self.alarms += shift_fault(found, wanted, noise=known.noise, share=POLICY_SHARE) is not None
        # The answer of a server that ignores the adapter.
        if self.found_from is None and shift_fault(0 * wanted, wanted, noise=known.noise, share=POLICY_SHARE) is not None:
            self.found_from = float(wanted.pow(2).mean().sqrt())


def drift(step: float, server: VllmServer, folder: Path) -> str:
    """Sync an adapter whose weights move by `step` a sync, a third of it in one direction."""
    policy = trainable_policy(BASE, ModelConfig(dtype=DTYPE), device=torch.device("cpu"), seed=1)
    engine = Watched(policy, load_tokenizer(BASE), VllmConfig(), [server], weights=folder / "served", dtype=DTYPE, merged=False)
    generator = torch.Generator().manual_seed(7)
    trained = [parameter.data for parameter in policy.parameters() if parameter.requires_grad]
    ways = [torch.randn(values.shape, generator=generator).sign() for values in trained]
    for _ in range(SYNCS):
        engine.sync()
        for values, way in zip(trained, ways, strict=True):
            values.add_(step * (0.3 * way + torch.randn(values.shape, generator=generator)))
    assert server.calibrated is not None
    noise = server.calibrated.noise
    engine.close()
    found = "never" if engine.found_from is None else f"from {engine.found_from:.3f} nats on"
    return f"step {step:g}: {SYNCS} syncs, {engine.alarms} alarms, noise {noise:.3f} nats; one that does nothing is found {found}"


def main() -> None:
    """Run both."""
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        with serving(VllmConfig(), ServerModel(Path(resolve("embedded:base")), DTYPE, 16, cuda=False), folder) as [server]:
            for step in (1e-5, 2e-4):
                print(drift(step, server, folder), flush=True)


if __name__ == "__main__":
    main()
