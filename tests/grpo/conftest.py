"""Stages to train: the embedded model, thirty sums, real rewards."""

import json
from contextlib import nullcontext
from dataclasses import dataclass

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from grpo_tasks.data.table import prompt_id
from grpo_tasks.grpo.trainer import Trainer
from grpo_tasks.stage.journal import read_events
from grpo_tasks.stage.stage_dir import StageDir, StageSpec
from schemas.config.model import ModelConfig
from schemas.config.operations import ResourcesConfig
from schemas.config.rewards import RewardsConfig
from schemas.config.rollout import RolloutConfig
from schemas.config.stage import StageConfig
from schemas.results.model import ModelRef
from tests.in_process import suite_of

SYSTEM = {"role": "system", "content": "Reply with <reasoning>...</reasoning><answer>...</answer>."}


@dataclass
class Stages:
    """Writes and trains small stages in folders of their own."""

    root: object

    def write(
        self,
        name="stage",
        *,
        start=None,
        length=40,
        model=None,
        rewards=None,
        stage_rewards=None,
        resources=None,
        rollout=None,
        **stage,
    ):
        """A stage directory, ready to be trained; further arguments are settings of the stage."""
        directory = StageDir(self.root / name)
        directory.root.mkdir()
        settings = {
            "name": "s",
            "rewards": stage_rewards or ["incremental_format", "format"],
            "max_steps": 3,
            "num_generations": 4,
            "per_device_train_batch_size": 8,
            "learning_rate": 1e-3,
            "save_steps": 10,
        }
        StageSpec(
            key="k",
            stage=StageConfig(**settings | stage),
            seed=3,
            model=ModelConfig(**model or {}),
            start=start or ModelRef(path="embedded:base"),
            rewards=RewardsConfig(**rewards or {}),
            rollout=RolloutConfig(max_completion_length=length, **rollout or {}),
            resources=ResourcesConfig(**{"device": "cpu", "num_threads": 1} | (resources or {})),
            train=self.root / "train.parquet",
            eval=self.root / "train.parquet",
        ).save(directory.spec)
        return directory

    def trainer(self, directory, suite):
        return Trainer(directory, suite)

    def train(self, name="stage", **settings):
        """Train a stage to its end; its result and its directory."""
        directory = self.write(name, **settings)
        return self.resume(directory), directory

    def resume(self, directory, until=None):
        """Train what is left of a stage; with `until` only up to that update, as a kill behind it leaves it."""
        spec = StageSpec.load(directory.spec)
        suite = suite_of(spec)
        # Demonstrations have no rewards.
        with suite if spec.stage.rewards else nullcontext():
            trainer = Trainer(directory, suite)
            trainer.updates = until or trainer.updates
            result = trainer.train()
        if until is not None:
            directory.result.unlink()
        return result


def journal(directory):
    """Metrics of each update."""
    return [json.loads(line)["metrics"] for line in directory.journal.read_text().splitlines()]


def events(directory):
    """What happened in a stage besides its updates."""
    return read_events(directory.events)


def stages_in(folder):
    """Stages of thirty sums."""
    rows = []
    for a in range(11, 41):
        messages, answer = [SYSTEM, {"role": "user", "content": f"What is {a} + 27?"}], str(a + 27)
        row = {"prompt_id": prompt_id(messages, answer), "source": "made", "line": a, "prompt": messages}
        rows.append(row | {"answer": answer, "prompt_tokens": 34, "extra": "{}", "answers": None, "task": ""})
    pq.write_table(pa.Table.from_pylist(rows), folder / "train.parquet")
    return Stages(folder)


@pytest.fixture
def stages(tmp_path):
    return stages_in(tmp_path)


@pytest.fixture
def train(stages):
    return stages.train


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """Results and directories of trained stages by their settings, for the tests of a module, which only read them."""
    made, known = stages_in(tmp_path_factory.mktemp("trained")), {}

    def train(**settings):
        key = json.dumps(settings, sort_keys=True)
        if key not in known:
            known[key] = made.train(f"stage-{len(known)}", **settings)
        return known[key]

    return train
