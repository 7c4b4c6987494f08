"""`engine: trl`: the same stage by TRL's trainer, with our journal, tables and result; one update of both engines compared."""

import json

import polars as pl
import pytest
import torch
from safetensors.torch import load_file

from grpo_tasks.grpo import trl
from grpo_tasks.stage.stage_dir import StageDir, StageSpec
from schemas.errors import ConfigError
from schemas.metrics import describe
from schemas.results.model import StageResult
from tests.forked import train_in_processes
from tests.grpo.conftest import journal
from tests.in_process import suite_of


@pytest.mark.long
def test_a_stage_by_trl_leaves_what_a_native_stage_leaves(stages):
    directory = stages.write("trl", engine="trl", trl={"scale_rewards": "batch"}, save_steps=2, max_steps=4, beta=0.04)
    train_in_processes(directory.root)
    result = StageResult.load(directory.result)
    assert (result.steps, result.stopped) == (4, "max_steps")
    assert (directory.final / "adapter_model.safetensors").exists()
    lines = journal(directory)
    assert len(lines) == 4
    assert all(describe(name) is not None for line in lines for name in line)
    for name in (
        "reward",
        "reward_std",
        "loss",
        "kl",
        "grad_norm",
        "rewards/format/mean",
        "completions/clipped_ratio",
        "step_time",
    ):
        assert name in lines[-1], name
    table = pl.read_parquet(directory.completions(4))
    assert table.height == 8
    assert (table["reward_format"] + table["reward_incremental_format"] - table["reward"]).abs().max() < 1e-6
    train_in_processes(directory.root)
    assert StageResult.load(directory.result) == result


@pytest.mark.long
def test_a_stage_by_trl_resumes_from_its_checkpoint(stages):
    settings = {"engine": "trl", "save_steps": 2, "max_steps": 4}
    directory = stages.write("stopped", **settings, early_stop={"metric": "reward", "target": -9.0, "window": 1, "min_steps": 2})
    train_in_processes(directory.root)
    assert StageResult.load(directory.result).stopped == "target"
    directory.result.unlink()
    spec = json.loads(directory.spec.read_text())
    spec["stage"]["early_stop"] = None
    directory.spec.write_text(json.dumps(spec))
    train_in_processes(directory.root)
    result = StageResult.load(directory.result)
    assert (result.steps, result.resumed) == (4, 1)
    assert [json.loads(line)["step"] for line in directory.journal.read_text().splitlines()] == [1, 2, 3, 4]
    # TRL measures no KL at beta 0. The event that its guard cannot fire is written once, not again after the resume.
    assert [json.loads(line)["event"] for line in directory.events.read_text().splitlines()].count("guard_off") == 1


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"baseline": "leave_one_out"}, "baseline"),
        ({"max_refills": 2}, "max_refills"),
        ({"trl": {"lerning_rate": 1.0}}, "lerning_rate"),
    ],
    ids=str,
)
def test_settings_that_trl_does_not_support_are_refused_by_name(stages, settings, said, tmp_path):
    spec = StageSpec.load(stages.write(engine="trl", **settings).spec)
    with pytest.raises(ConfigError, match=said):
        trl.grpo_config(spec, tmp_path / "out", torch.device("cpu"))


def test_trl_gets_the_time_limit_of_the_config(stages, tmp_path):
    directory = stages.write("trl", engine="trl", resources={"distributed_timeout_minutes": 47.5})
    arguments = trl.grpo_config(StageSpec.load(directory.spec), tmp_path, torch.device("cpu"))
    assert arguments.ddp_timeout_delta.total_seconds() == 2850.0


@pytest.mark.slow
@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"beta": 0.1, "loss_type": "grpo"},
        {"loss_type": "dr_grpo", "scale_rewards": "none", "optim": "adamw_torch"},
        {"loss_type": "bnpo", "multi_objective_aggregation": "normalize_then_sum", "entropy_coef": 0.01},
        {"loss_type": "cispo", "epsilon_high": 5.0, "per_device_train_batch_size": 4, "gradient_accumulation_steps": 2},
        {"loss_type": "sapo", "top_entropy_quantile": 0.4, "use_bias_correction_kl": True, "beta": 0.1},
    ],
    ids=str,
)
def test_one_update_of_both_on_the_same_completions_moves_the_weights_alike(stages, settings, monkeypatch):
    """Same weights, same completions, same rewards: after one update the parameters agree within 1e-5."""
    # A large epsilon: else Adam's first step is the sign of the gradient, and rounding decides where that is almost zero.
    adam = {"learning_rate": 0.1, "adam_epsilon": 1e-2}
    chosen = {"max_steps": 1, "length": 24, "reference": "stage_start", **adam, **settings}
    first, _ = stages.train("first", max_steps=2, learning_rate=1e-2)
    ours, rounds = stages.write("ours", start=first.model, **chosen), []
    spec = StageSpec.load(ours.spec)
    with suite_of(spec) as suite:
        trainer = stages.trainer(ours, suite)
        collect = trainer._collect
        monkeypatch.setattr(trainer, "_collect", lambda: rounds.append(collect()) or rounds[-1])
        trainer.train()
    [sampled] = [found.scored.rollout for found in rounds]

    def generate(self, prompt_ids, *_, **__):
        """What ours has sampled for TRL's prompts."""
        groups, found = {tuple(ids): index for index, ids in enumerate(sampled.prompts)}, []
        for ids in prompt_ids:
            group = groups[tuple(ids)]
            sample = sum(other == group for other, _ in found)
            found.append((group, sampled.completions[group * sampled.group_size + sample].token_ids))
        return [list(ids) for _, ids in found], None

    monkeypatch.setattr(trl._SuiteTrainer, "_generate_single_turn", generate)
    theirs = stages.write("theirs", start=first.model, engine="trl", **chosen)
    wanted = {row.prompt_id for row in sampled.rows}
    monkeypatch.setattr(trl, "read_prompts", lambda _: [row for row in trainer.rows if row.prompt_id in wanted])
    spec = StageSpec.load(theirs.spec)
    with suite_of(spec) as suite:
        trl.train(theirs, spec, suite)
    start = load_file(first.model.adapter / "adapter_model.safetensors")
    one, other = (load_file(StageDir(each.root).final / "adapter_model.safetensors") for each in (ours, theirs))
    moved = max((one[name] - start[name]).abs().max().item() for name in start)
    assert moved > 1e-5
    for name in start:
        torch.testing.assert_close(one[name] - start[name], other[name] - start[name], rtol=1e-3, atol=1e-5)
