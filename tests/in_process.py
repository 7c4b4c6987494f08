"""Built-in rewards scored in the process of a test: requests and replies as with a worker, without its second of start."""

import json
from types import SimpleNamespace

from grpo_tasks.rewards import serve
from grpo_tasks.rewards.suite import RewardSuite
from grpo_tasks.rewards.worker import RewardWorker


class InProcessWorker(RewardWorker):
    """A RewardWorker whose other end is called here. For functions of ours only: a hang or a crash would be the test's own."""

    def start(self):
        self.functions, self.link = serve.Functions(), SimpleNamespace(has_unread_bytes=lambda: False)

    def close(self):
        self.link = None

    def exchange(self, what, message, shape, **_limits):
        reply = getattr(self.functions, what)(json.loads(json.dumps(message)))
        return shape.read(json.dumps({"request": "r", **reply}).encode(), "r", message)


def suite_of(spec):
    """The rewards of a stage: in this process where all are built in, in a worker where one is a test's own."""
    suite = RewardSuite(spec.rewards, spec.stage.rewards)
    if not any(config.function and ":" in config.function for config in suite.configs):
        suite.worker = InProcessWorker(spec.rewards, spec.stage.rewards)
    return suite
