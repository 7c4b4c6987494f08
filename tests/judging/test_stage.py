"""A judge as the reward of a stage: scores, metrics, and an outage from which the stage resumes to the same bytes."""

import json

import polars as pl
import pytest
from pydantic import ValidationError

from grpo_tasks.content.conversations import Played
from grpo_tasks.rewards.contract import ScoreBatch
from grpo_tasks.rewards.suite import RewardSuite
from grpo_tasks.running.key import content_key
from grpo_tasks.stage.stage_dir import StageSpec
from schemas.config.rewards import RewardsConfig
from schemas.config.run import RunConfig
from schemas.errors import JudgeUnavailableError
from tests.grpo.conftest import journal, stages  # noqa: F401 - a fixture


def rewards(settings, **changes):
    """The section `rewards` with one judge."""
    return {"functions": {"taste": {"function": "judge", "judge": json.loads(settings(**changes).model_dump_json())}}}


@pytest.fixture
def likes_nines(endpoint):
    endpoint.opinion = lambda texts, _: {"points": min(4, texts["completion"].count("9"))}
    return endpoint


def test_a_judge_is_a_reward_like_any_other(stages, settings, likes_nines):  # noqa: F811
    _, directory = stages.train(rewards=rewards(settings), stage_rewards=["taste"], max_steps=2)
    lines, table = journal(directory), pl.read_parquet(directory.completions(1))
    assert [min(4, text.count("9")) / 4 for text in table["completion"]] == table["reward_taste"].to_list()
    assert lines[0]["rewards/taste/mean"] == pytest.approx(table["reward_taste"].mean())
    assert lines[0]["logged/taste/asked"] + lines[0]["logged/taste/cached"] >= 1
    assert "logged_taste_note" in table.columns
    # The judge sees the question, not how the policy is told to reply.
    assert "reasoning" not in likes_nines.requests[0]["messages"][1]["content"].split("completion]")[0]


CALL = "<tool_call>{'name': broken</tool_call>"
"""What the policy wrote; nobody can read this call, so it is in no message."""


def turn(text, said, *answers):
    given = {"text": text, "start": 0, "end": 1, "finish_reason": "stop", "reward": None, "calls": 1, "errors": 0, "info": {}}
    return given, [{"role": "assistant", "content": said}, *answers]


def test_a_judge_sees_the_whole_conversation_and_a_last_call(settings, endpoint):
    answer = {"role": "tool", "name": "add", "content": "good 42"}
    turns = [turn("I add.<|im_end|>", "I add.", answer), turn(f"{CALL}<|im_end|>", "", {"role": "user", "content": "out"})]
    played = Played([], [message for _, said in turns for message in said], [given for given, _ in turns], None)
    given, said = turn("good<|im_end|>", "good")
    alone = Played([], said, [given], None)
    shown = []
    endpoint.opinion = lambda texts, _: shown.append(texts) or {"points": 4 if len(texts) > 2 else 1}
    section = RewardsConfig.model_validate(rewards(settings, max_concurrency=1))
    batch = ScoreBatch([[{"role": "user", "content": "Why?"}]] * 2, ["", "good"], [[1], [2]], {}, played=[played, alone])
    with RewardSuite(section, ["taste"]) as suite:
        assert suite.score(batch).raw[:, 0].tolist() == [1.0, 0.25]
    assert shown == [
        {
            "question": "Why?",
            "completion, 1 policy": "I add.",
            "completion, 2 tool": "good 42",
            "completion, 3 policy": CALL,
            "completion, 4 environment": "out",
        },
        {"question": "Why?", "completion": "good"},
    ]


@pytest.mark.slow
def test_an_outage_stops_with_a_checkpoint_and_resumes_the_same(stages, settings, likes_nines):  # noqa: F811
    given = {"stage_rewards": ["taste"], "max_steps": 6, "save_steps": 50}
    whole, first = stages.train("whole", rewards=rewards(settings), **given)
    cut = stages.write("cut", rewards=rewards(settings, cache=stages.root / "other"), **given)
    asked = likes_nines.answer
    count = []

    def fails_later(body):
        count.append(1)
        likes_nines.down = len(count) > 20
        return asked(body)

    likes_nines.answer = fails_later
    spec = StageSpec.load(cut.spec)
    with RewardSuite(spec.rewards, spec.stage.rewards) as suite, pytest.raises(JudgeUnavailableError, match="503") as caught:
        stages.trainer(cut, suite).train()
    assert "start the same command again" in caught.value.fix
    assert len(list(cut.checkpoints.iterdir())) == 1
    made = len(journal(cut))
    assert 0 < made < 6
    likes_nines.answer, likes_nines.down = asked, False
    with RewardSuite(spec.rewards, spec.stage.rewards) as suite:
        again = stages.trainer(cut, suite).train()
    assert (again.resumed, again.sha256) == (1, whole.sha256)
    assert [line["reward"] for line in journal(cut)] == [line["reward"] for line in journal(first)]


def test_on_error_does_not_hide_an_outage(stages, settings, likes_nines):  # noqa: F811
    likes_nines.down = True
    section = rewards(settings)
    section["functions"]["taste"]["on_error"] = "zero"
    with pytest.raises(JudgeUnavailableError):
        stages.train(rewards=section, stage_rewards=["taste"])


def test_a_judge_without_settings_and_settings_without_a_judge_are_refused(settings):
    with pytest.raises(ValidationError, match=r"functions.taste has no judge; fix: judge: \{base_urls"):
        RewardsConfig(functions={"taste": {"function": "judge"}})
    with pytest.raises(ValidationError, match="fix: function: judge"):
        RewardsConfig(functions={"taste": {"function": "format", "judge": settings()}})
    stage = {"name": "s", "rewards": ["judge"]}
    with pytest.raises(ValidationError, match=r"judge needs a judge; fix: rewards.functions.judge.judge"):
        RunConfig(data={"train": [{"path": "embedded:arithmetic_train.jsonl"}]}, stages=[stage])


def test_another_address_or_limit_is_no_other_judge_and_another_rubric_is(settings):
    def key(**changes):
        return content_key("train_stage", (), {"rewards": RewardsConfig.model_validate(rewards(settings, **changes))})

    known = key()
    assert key(base_urls=["http://other:1/v1"], max_outage_s=5.0, cache="elsewhere", api_key_variable="OTHER") == known
    assert key(max_cost=2.0, input_price=1.0) == known
    assert key(rubric=[{"name": "clarity", "description": "Is it short?"}]) != known
    assert key(votes=3) != known


def test_a_variables_name_is_no_secret_and_a_key_is(settings):
    def config(variable):
        given = json.loads(settings().model_dump_json()) | {"api_key_variable": variable}
        section = {"functions": {"taste": {"function": "judge", "judge": given}}}
        return RunConfig(
            data={"train": [{"path": "embedded:arithmetic_train.jsonl"}]},
            stages=[{"name": "s", "rewards": ["taste"]}],
            rewards=section,
        )

    assert config("MY_JUDGE_API_KEY").rewards.functions["taste"].judge.api_key_variable == "MY_JUDGE_API_KEY"
    with pytest.raises(ValidationError) as caught:
        config("sk-abcdef0123456789abcdef")
    assert "abcdef0123456789" not in str(caught.value)
