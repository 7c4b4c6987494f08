"""Complete stages in this process, on the embedded model with real rewards."""

import polars as pl
import pytest

from grpo_tasks.grpo.__main__ import main
from grpo_tasks.stage.stage_dir import StageSpec
from schemas.errors import TrainingError
from schemas.metrics import describe
from tests.grpo.conftest import journal
from tests.in_process import suite_of

ON_POLICY = {"beta": 0.01, "importance_sampling_correction": "token_truncate"}


@pytest.mark.slow
def test_on_policy_ratios_are_one_and_the_sampler_agrees_with_the_trainer(trained):
    _, directory = trained(**ON_POLICY)
    lines = journal(directory)
    assert [name for line in lines for name in line if describe(name) is None] == []
    for line in lines:
        assert line["clip_ratio/region_mean"] == 0
        assert line["sampling/sampling_logp_difference/max"] < 1e-4
    assert lines[0]["sampling/importance_sampling_ratio/mean"] == pytest.approx(1.0, abs=1e-4)
    assert lines[0]["kl"] == pytest.approx(0, abs=1e-6)
    assert lines[-1]["kl"] > 0
    # Of float16 alone.
    assert not {"loss_scale", "skipped_step"} & lines[0].keys()


def test_several_updates_of_one_rollout_bring_the_ratio_back(train):
    _, directory = train(num_iterations=3, max_steps=6, learning_rate=1e-2)
    lines = journal(directory)
    assert lines[0]["reward"] == lines[1]["reward"] == lines[2]["reward"]
    assert lines[0]["sampling/sampling_logp_difference/max"] == pytest.approx(
        lines[2]["sampling/sampling_logp_difference/max"], abs=1e-4
    )
    assert lines[2]["clip_ratio/region_mean"] > 0


def test_a_truncated_or_penalised_stage_reports_no_mismatch(train):
    rollout = {"min_p": 0.05, "repetition_penalty": 1.2, "top_p": 0.9}
    _, directory = train(rollout=rollout, max_sampling_logp_difference=0.01, skip_dead_groups=False)
    differences = [line["sampling/sampling_logp_difference/max"] for line in journal(directory)]
    assert len(differences) == 3
    assert max(differences) < 1e-4


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        ({"early_stop": {"metric": "reward", "target": -1.0, "window": 2, "min_steps": 3}}, "target"),
        # It moves too little for a better evaluation than the first one.
        ({"learning_rate": 1e-12, "eval_steps": 1, "num_eval_prompts": 2, "early_stopping_patience": 2}, "plateau"),
    ],
)
def test_a_stage_ends_early_at_its_target_or_a_plateau(train, settings, why):
    result, _ = train(max_steps=50, **settings)
    assert (result.steps, result.stopped) == (3, why)


def test_completions_that_are_cut_off_are_masked_only_when_asked(train):
    settings = {"length": 6, "loss_type": "grpo", "max_steps": 1, "skip_dead_groups": False, "entropy_coef": 0.1}
    [loose] = journal(train("loose", **settings)[1])
    [masked] = journal(train("masked", **settings, mask_truncated_completions=True)[1])
    assert loose["completions/clipped_ratio"] == masked["completions/clipped_ratio"] == 1.0
    assert loose["completions/max_length"] == 6
    assert masked["grad_norm"] == 0 < loose["grad_norm"]


@pytest.mark.slow
def test_the_completions_table_names_each_completion_once_with_its_rewards(trained):
    _, directory = trained(**ON_POLICY)
    table = pl.read_parquet(directory.completions(3))
    assert table.height == 8
    assert table.select("stage", "step", "prompt_id", "sample").is_unique().all()
    total = table["reward_format"] + table["reward_incremental_format"]
    assert (total - table["reward"]).abs().max() < 1e-9
    assert abs(table["advantage"].sum()) < 1e-4


@pytest.mark.slow
def test_dead_groups_are_replaced_by_groups_of_further_prompts(train):
    _, plain = train("plain", stage_rewards=["format"])
    _, refilled = train("refilled", stage_rewards=["format"], max_refills=4)
    dead = [[line["frac_reward_zero_std"] for line in journal(directory)] for directory in (plain, refilled)]
    assert sum(dead[1]) < sum(dead[0])
    dropped = [line["dynamic_sampling/dropped_groups"] for line in journal(refilled)]
    assert sum(dropped) > 0
    # What is dropped was sampled, and counts.
    assert journal(refilled)[-1]["num_tokens"] > journal(plain)[-1]["num_tokens"]
    assert "dynamic_sampling/dropped_groups" not in journal(plain)[0]


@pytest.mark.slow
def test_a_reward_for_each_token_makes_an_advantage_for_each_token(train, tmp_path, monkeypatch):
    """Pay every token but the first: from the start the probability of the paid ones rises over that of the first."""
    (tmp_path / "paying.py").write_text(
        "def later(prompts, completions, completion_ids, **columns):\n"
        "    return [[0.0] + [float(i % 7) for i in range(len(ids) - 1)] for ids in completion_ids]\n"
    )
    monkeypatch.chdir(tmp_path)
    functions = {"functions": {"later": {"function": "paying:later"}}}
    _, directory = train(rewards=functions, stage_rewards=["later"])
    table = pl.read_parquet(directory.completions(1))
    for length, reward in zip(table["completion_tokens"], table["reward_later"], strict=True):
        assert reward == pytest.approx(sum(i % 7 for i in range(length - 1)) / length)
    assert journal(directory)[0]["grad_norm"] > 0


def test_a_stage_whose_completions_come_from_another_model_is_stopped(stages):
    directory = stages.write()
    spec = StageSpec.load(directory.spec)
    with suite_of(spec) as suite:
        trainer = stages.trainer(directory, suite)
        trainer.learner.policies.temperature = 4.0
        with pytest.raises(TrainingError, match=r"sampler and trainer differ by .* nats a token, more than 0.5"):
            trainer.train()
    assert not directory.result.exists()


@pytest.mark.slow
def test_dead_groups_keep_their_kl_only_when_asked(train):
    first, _ = train("first", learning_rate=1e-2)
    settings = {"start": first.model, "beta": 1.0, "reference": "base", "stage_rewards": ["style"], "length": 2}
    _, skipped = train("skipped", **settings)
    _, kept = train("kept", skip_dead_groups=False, **settings)
    assert all(line["frac_reward_zero_std"] == 1.0 for line in journal(skipped)[:1] + journal(kept)[:1])
    assert journal(skipped)[0]["grad_norm"] == 0
    assert journal(kept)[0]["grad_norm"] > 0


@pytest.mark.slow
def test_a_base_in_four_bits_is_trained_under_its_adapter(trained):
    result, directory = trained(model={"quantization": "nf4"}, beta=0.01)
    sizes = [(each.final / "adapter_model.safetensors").stat().st_size for each in (directory, trained(**ON_POLICY)[1])]
    assert sizes[0] == sizes[1]
    for line in journal(directory):
        assert line["sampling/sampling_logp_difference/max"] < 1e-3
        assert line["kl"] >= 0
    assert result.steps == 3
    assert journal(directory)[-1]["grad_norm"] > 0


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision_trains_and_the_sampler_stays_near_the_trainer(train, dtype):
    _, directory = train(model={"dtype": dtype})
    for line in journal(directory):
        assert line["sampling/sampling_logp_difference/mean"] < 0.05


def test_rewards_print_into_the_stages_log_alone(stages, tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "loud.py").write_text(
        "def loud(completions, trainer_state, **columns):\n"
        "    print('update', trainer_state.global_step, 'of', trainer_state.max_steps)\n"
        "    return [float(len(chat[0]['content'])) for chat in completions]\n"
    )
    functions = {"functions": {"loud": {"function": "loud:loud"}}}
    directory = stages.write("loud", rewards=functions, stage_rewards=["loud"], max_steps=2)
    main(directory.root)
    assert "update" not in "".join(capfd.readouterr())
    assert directory.log.read_text() == "update 1 of 2\nupdate 2 of 2\n"


def test_a_stage_killed_before_its_result_completes_on_resume(stages):
    """Also in the middle of a round: the target is reached after the first of two updates on it."""
    settings = {
        "max_steps": 9,
        "num_iterations": 2,
        "early_stop": {"metric": "reward", "target": -1.0, "window": 1, "min_steps": 3},
    }
    wanted, directory = stages.train("killed", **settings)
    lines = directory.journal.read_text()
    directory.result.unlink()
    again = stages.resume(directory)
    assert (again.steps, again.stopped, again.resumed, again.sha256) == (3, "target", 1, wanted.sha256)
    assert directory.journal.read_text() == lines


def test_the_completions_table_has_the_pass_rates_that_are_known(stages):
    path = stages.root / "train.parquet"
    rows = pl.read_parquet(path)
    rates = pl.Series("pass_rate", [None, *(index / rows.height for index in range(1, rows.height))])
    rows.with_columns(rates, pass_rate_low=rates / 2, pass_rate_high=pl.lit(None, dtype=pl.Float64)).write_parquet(path)
    _, directory = stages.train(max_steps=1)
    table = pl.read_parquet(directory.completions(1))
    known = dict(zip(rows["prompt_id"], rates, strict=True))
    assert table["pass_rate"].to_list() == [known[prompt] for prompt in table["prompt_id"]]
    assert table["pass_rate_low"].null_count() == table["pass_rate"].null_count()
    assert table["pass_rate_high"].null_count() == table.height
