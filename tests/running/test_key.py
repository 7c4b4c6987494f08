"""Content keys: what makes a step run again, and what does not."""

from grpo_tasks.running import key as key_module
from grpo_tasks.running.key import code_behind, content_key
from schemas.config.data import DataSource
from schemas.config.rewards import RewardConfig, RewardsConfig
from schemas.config.rollout import InteractionConfig
from schemas.config.stage import StageConfig
from schemas.results.data import PreparedData


def key(**inputs):
    return content_key("step", (), inputs)


def forget():
    for cached in (key_module.code_sha256, key_module.code_behind, key_module._source):
        cached.cache_clear()


def test_the_key_follows_the_content_of_data_files_not_their_place(tmp_path):
    path = tmp_path / "rows.jsonl"
    source = DataSource(path=str(path))
    path.write_text("one")
    first = key(source=source)
    path.write_text("two")
    assert key(source=source) != first
    path.write_text("one")
    assert key(source=source) == first


def test_the_key_follows_the_code_of_the_users_own_reward(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text("import helper\ndef f(): ...")
    (tmp_path / "helper.py").write_text("LIMIT = 1")
    reward = RewardsConfig(functions={"f": RewardConfig(function="mine:f")})
    first = key(reward=reward)
    (tmp_path / "helper.py").write_text("LIMIT = 2")
    second = key(reward=reward)
    (tmp_path / "mine.py").write_text("import helper\ndef f(): return 1")
    assert len({first, second, key(reward=reward)}) == 3


def test_the_key_follows_the_code_next_to_the_config(tmp_path):
    def rewards(folder, limit):
        (tmp_path / folder).mkdir(exist_ok=True)
        (tmp_path / folder / "beside_config.py").write_text("import helper_beside\ndef f(): ...")
        (tmp_path / folder / "helper_beside.py").write_text(f"LIMIT = {limit}")
        return RewardsConfig(functions={"f": RewardConfig(function="beside_config:f")}, module_dir=tmp_path / folder)

    assert key(rewards=rewards("a", 1)) == key(rewards=rewards("b", 1)) != key(rewards=rewards("a", 2))


def test_an_earlier_step_counts_by_its_key_and_not_by_its_time(tmp_path):
    result = PreparedData(key="abc", directory=tmp_path, seconds=1.0, sources=[], rows=1)
    slower = result.model_copy(update={"seconds": 9.0})
    other = result.model_copy(update={"key": "abd"})
    assert key(rows=result) == key(rows=slower) != key(rows=other)


def test_the_key_follows_the_step_its_code_and_its_inputs():
    assert key(seed=1) != key(seed=2)
    assert content_key("a", (), {}) != content_key("b", (), {})
    assert content_key("a", ("grpo_tasks.data.rules",), {}) != content_key("a", ("grpo_tasks.data.table",), {})


def test_the_key_follows_the_code_that_writes_demonstrations(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "shown.py").write_text("def show(row): return 'a'\n")
    stage = StageConfig(name="s", kind="sft", demonstrations={"function": "shown:show"})
    before = content_key("train_stage", (), {"stage": stage})
    assert content_key("train_stage", (), {"stage": stage}) == before
    (tmp_path / "shown.py").write_text("def show(row): return 'b'\n")
    assert content_key("train_stage", (), {"stage": stage}) != before


def test_the_key_follows_a_module_of_ours_that_only_the_config_names(tmp_path, monkeypatch):
    interaction = InteractionConfig(environment="grpo_tasks.environments.verifiers_adapter:VerifiersEnvironment")
    before = key(interaction=interaction)
    assert "grpo_tasks.environments.verifiers_adapter" not in code_behind("grpo_tasks.steps.train_stage")
    changed = tmp_path / "grpo_tasks" / "environments" / "verifiers_adapter.py"
    changed.parent.mkdir(parents=True)
    changed.write_text("x = 1\n")
    monkeypatch.setattr(key_module, "_ROOT", tmp_path)
    forget()
    assert key(interaction=interaction) != before
    forget()
