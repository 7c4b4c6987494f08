"""Real stores: an SQLite file per test, and one `mlflow server` on 127.0.0.1 for the session."""

import json
import shutil
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import polars as pl
import pytest
from cryptography.fernet import Fernet
from mlflow import MlflowClient
from safetensors.numpy import save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from grpo_tasks.content.hashes import folder_sha256
from grpo_tasks.stage.stage_dir import StageDir, StageSpec
from grpo_tasks.tracking.models import current_champion
from grpo_tasks.tracking.publishing import publish
from grpo_tasks.tracking.runs import open_run
from grpo_tasks.tracking.store import open_store
from schemas.config.run import RunConfig
from schemas.results.data import DataReport, LabCheck, LabReport, RuleCount, SignalForecast, TokenLengths
from schemas.results.evaluation import EvalReport, Interval, PairedTest
from schemas.results.model import GreedyAnswer, MergeProof, ModelRef, RefusedPrecision, StageResult
from tests.flows.place import end_group, started_mlflow
from tests.ports import free_ports

BASE = Path(__file__).resolve().parents[2] / "grpo_tasks" / "demo" / "base"
STARTED_MS = 1_789_000_000_000


@pytest.fixture(scope="session")
def empty_database(tmp_path_factory):
    """An SQLite store with its tables: creating them takes seconds, copying the file does not."""
    file = tmp_path_factory.mktemp("template") / "empty.db"
    MlflowClient(f"sqlite:///{file}").search_experiments()
    return file


@pytest.fixture(scope="session")
def server(empty_database, tmp_path_factory):
    """Address of a real server, which sends webhooks to this machine at once."""
    home, [port] = tmp_path_factory.mktemp("server"), free_ports(1)
    shutil.copy(empty_database, home / "mlflow.db")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MLFLOW_WEBHOOK_ALLOWED_SCHEMES", "http")
        patch.setenv("MLFLOW_WEBHOOK_ALLOW_PRIVATE_IPS", "true")
        patch.setenv("MLFLOW_WEBHOOK_SECRET_ENCRYPTION_KEY", Fernet.generate_key().decode())
        patch.setenv("MLFLOW_WEBHOOK_CACHE_TTL", "0")
        process = started_mlflow(home, port)
    yield f"http://127.0.0.1:{port}"
    end_group(process)


@pytest.fixture
def database(request, empty_database, tmp_path, monkeypatch):
    """Uri of an SQLite store for this test, its artifacts in the same folder; the server's uri if parametrised with "server"."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    if getattr(request, "param", "sqlite") == "server":
        return request.getfixturevalue("server")
    shutil.copy(empty_database, tmp_path / "mlflow.db")
    return f"sqlite:///{tmp_path / 'mlflow.db'}"


@pytest.fixture
def make_config(request):
    """A small configuration with two stages; the experiment carries the test's name."""

    def make(uri, **changes):
        name = "t-" + "".join(letter if letter.isalnum() else "-" for letter in request.node.name)[:50].strip("-")
        tree = {
            "name": name,
            "data": {"train": [{"path": "train.jsonl"}], "system_prompt": "Answer in tags."},
            "rewards": {"functions": {"own": {"function": "my.rewards:own", "params": {"needle": ["a", "b"]}}}},
            "stages": [
                {"name": "format", "rewards": ["format", "own"], "max_steps": 40, "learning_rate": 1e-3},
                {"name": "correctness", "rewards": ["correctness"], "max_steps": 30},
            ],
            "tracking": {"tracking_uri": uri},
        }
        return RunConfig.model_validate(tree | changes)

    return make


@pytest.fixture
def config(database, make_config):
    return make_config(database)


@pytest.fixture
def client(database):
    return MlflowClient(database)


def write_journal(path: Path, steps, *, started_ms=STARTED_MS, shift=0.0):
    """Append the lines of some updates, as the trainer writes them."""
    with path.open("a", encoding="utf-8") as file:
        for step in steps:
            metrics = {
                "reward": 0.1 * step + shift,
                "reward_std": 1.0 / step,
                "kl": 0.001 * step,
                "rewards/format/mean": min(1.0, step / 40),
                "rewards/own/mean": 0.5,
                "completions/mean_length": 30.0 + step % 5,
                "completions/max_length": 60.0,
                "completions/clipped_ratio": 0.0,
                "frac_reward_zero_std": 0.25,
                "learning_rate": 1e-3 * (1 - step / 100),
                "tokens_per_s": 2_000.0 + step,
            }
            line = {"step": step, "timestamp_ms": started_ms + 250 * step, "metrics": metrics}
            file.write(json.dumps(line) + "\n")


@pytest.fixture
def make_stage(tmp_path):
    """A stage directory as the trainer leaves it, finished or (finish=False) interrupted."""

    def make(config, stage="format", *, key="a1b2c3d4e5f60718", steps=40, finish=True):
        directory = tmp_path / "stages" / f"{stage}-{key[:8]}"
        paths = StageDir(directory)
        paths.completions(0).parent.mkdir(parents=True)
        spec = StageSpec(
            key=key,
            stage=config.stage(stage),
            seed=config.seed,
            model=config.model,
            start=ModelRef(path=config.model.path),
            rewards=config.rewards,
            rollout=config.rollout,
            resources=config.resources,
            train=tmp_path / "train.parquet",
        )
        spec.save(paths.spec)
        write_journal(paths.journal, range(1, steps + 1))
        rows = {"prompt_id": ["a", "a", "b"], "sample": [0, 1, 0], "completion": ["x" * 5_000, "", "<answer>4</answer>"]}
        pl.DataFrame(rows | {"reward": [0.0, 0.5, 1.0]}).write_parquet(paths.completions(20))
        pl.DataFrame(rows | {"reward": [1.0, 0.5, 1.0], "advantage": [0.5, -0.5, 0.0]}).write_parquet(paths.completions(40))
        paths.final.mkdir()
        save_file({"lora_A.weight": np.ones((2, 3), np.float32)}, paths.final / "adapter_model.safetensors")
        (paths.final / "adapter_config.json").write_text('{"r": 2}')
        result = StageResult(
            key=key,
            directory=directory,
            seconds=10.0,
            stage=stage,
            model=ModelRef(path=config.model.path, adapter=paths.final),
            sha256="5" * 64,
            steps=steps,
            stopped="max_steps",
            metrics={"reward": 3.5, "kl": 0.03},
        )
        if finish:
            result.save(paths.result)
        return result

    return make


@pytest.fixture
def data_report(tmp_path):
    """Validated data on disk."""
    directory = tmp_path / "data"
    directory.mkdir()
    for side, count in (("train", 12), ("eval", 4)):
        rows = {
            "prompt_id": [f"{number:016x}" for number in range(count)],
            "prompt": [[{"role": "user", "content": f"What is {number} + 1?"}] for number in range(count)],
            "answer": [str(number + 1) for number in range(count)],
        }
        pl.DataFrame(rows).write_parquet(directory / f"{side}.parquet")
    pl.DataFrame({"source": ["a.jsonl"], "line": [3], "rule": ["empty_answer"]}).write_parquet(directory / "quarantine.parquet")
    (directory / "report.md").write_text("# Data\n")
    return DataReport(
        key="d" * 16,
        directory=directory,
        seconds=1.0,
        rows=17,
        quarantined=1,
        train_rows=12,
        eval_rows=4,
        rules=[RuleCount(rule="empty_answer", meaning="the answer is empty", rows=1)],
        prompt_tokens=TokenLengths(mean=20, p50=20, p95=22, max=23, limit=128),
        sources=[],
        digest="abc123" * 10 + "abcd",
    )


@pytest.fixture
def lab_report(tmp_path):
    """A lab's report on disk, with a probe of 1 MB."""
    directory = tmp_path / "probe_rewards" / "all"
    directory.mkdir(parents=True)
    probes = {"probe": ["perfect", "megabyte"], "completion": ["ok", "z" * 1_000_000], "scores": [[1.0], [0.0]]}
    pl.DataFrame(probes | {"format": [1.0, 0.0]}).write_parquet(directory / "probes.parquet")
    (directory / "report.md").write_text("# Lab\n")
    checks = [LabCheck(function="format", check="order", outcome="passed")]
    signal = SignalForecast(stage="format", groups=16, share_with_signal=0.75, mean_reward=0.4, mean_reward_std=0.2)
    return LabReport(key="e" * 16, directory=directory, seconds=1.0, checks=checks, forecasts=[signal])


@pytest.fixture
def make_evaluation(tmp_path):
    """An evaluation on disk."""

    def make(label, accuracy=0.9, key="f" * 16):
        directory = tmp_path / f"evaluation-{label}-{key[:4]}"
        directory.mkdir(exist_ok=True)
        rows = {"prompt_id": ["a", "b"], "sample": [0, 0], "completion": ["x", "y"], "correct": [True, False]}
        pl.DataFrame(rows).write_parquet(directory / "samples.parquet")
        (directory / "report.md").write_text(f"# {label}\n")
        interval = Interval(value=accuracy, low=accuracy - 0.05, high=accuracy + 0.05)
        names = ("accuracy", "format_rate", "greedy_accuracy", "lenient_accuracy")
        known = {"key": key, "directory": directory, "seconds": 1.0, "label": label, "model": ModelRef(path="embedded:base")}
        sampled = {"prompts": 2, "num_samples": 1, "temperature": 1.0, "confidence": 0.95}
        figures = {"metrics": dict.fromkeys(names, interval), "pass_at_k": {1: interval, 4: interval}}
        report = EvalReport(**known, **sampled, **figures)
        report.save(directory / "result.json")
        return report

    return make


@pytest.fixture(scope="session")
def base_answers():
    """What the embedded base model answers to two chats, by transformers alone."""
    model, tokenizer = AutoModelForCausalLM.from_pretrained(BASE, dtype="float32"), AutoTokenizer.from_pretrained(BASE)
    answers = []
    for question in ("What is 15 + 27?", "What is 60 + 27?"):
        chat = [{"role": "user", "content": question}]
        prompt = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt", return_dict=True)
        tokens = model.generate(**prompt, max_new_tokens=64, do_sample=False)[0, prompt["input_ids"].shape[1] :]
        answers.append(GreedyAnswer(messages=chat, text=tokenizer.decode(tokens, skip_special_tokens=True)))
    return answers


@pytest.fixture
def make_merge(tmp_path, base_answers):
    """A merged model on disk: a copy of the embedded base model. Different letters differ in one file that is not loaded."""

    def make(letter="7", key="9" * 16):
        directory = tmp_path / f"merge-{letter}"
        shutil.copytree(BASE, directory / "model", dirs_exist_ok=True)
        (directory / "model" / "letter.txt").write_text(letter)
        (directory / "adapter").mkdir(exist_ok=True)
        for name, text in (("adapter_config.json", "{}"), ("adapter_model.safetensors", f"weights {letter}")):
            (directory / "adapter" / name).write_text(text)
        policy = ModelRef(path=str(BASE), adapter=directory / "adapter", sha256=folder_sha256(directory / "adapter"))
        model = ModelRef(path=str(directory / "model"))
        measured = {"prompts": 8, "kept": 0.9876, "kept_weights": 0.998, "base_kl": 1e-4, "merged_kl": 1e-8}
        measured |= {"merge_difference": 1e-6, "max_logprob_difference": 1e-6, "mean_logprob_difference": 1e-7}
        measured |= {"base_logprob_difference": 1e-3, "tolerance": 1e-3, "greedy_agreement": 1.0, "base_greedy_agreement": 0.5}
        refused = [RefusedPrecision(dtype="bfloat16", kept_weights=0.24, reason="it keeps 24 % of the change of the weights")]
        known = {"key": key, "directory": directory, "seconds": 1.0, "model": model, "policy": policy, "dtype": "float16"}
        hashed = {"sha256": folder_sha256(directory / "model"), "size_bytes": 1_300_000}
        return MergeProof(**known, **hashed, **measured, refused=refused, answers=base_answers)

    return make


def verdict(against, better):
    difference, p_value = (0.3, 0.001) if better else (0.0, 0.6)
    return PairedTest(against=against, metric="accuracy", prompts=64, difference=difference, p_value=p_value, better=better)


def log_files(spec):
    """What the registry needs of `log_model`: the files of the merged model, without the flavors that load it."""
    store = open_store(spec.tracking)
    store.client.log_model_artifacts(spec.model_id, str(spec.path), "model")
    store.client.finalize_logged_model(spec.model_id, "READY")


@pytest.fixture
def offer(make_evaluation):
    """Publish in a run: better than the base, and than the champion (by default the present one) unless it is not `better`."""

    def publish_in(run, proof, *, better=True, **options):
        if "champion" not in options:
            options["champion"] = current_champion(run.store, run.config.registered_model)
        tests = [verdict("base", True)] + ([verdict("champion", better)] if options["champion"] else [])
        known = {"tests": tests, "evaluation": make_evaluation("merged"), "log": log_files, "prove": lambda _: None}
        return publish(run, proof, **known | options)

    return publish_in


@pytest.fixture
def publish_one(make_merge, offer):
    """Publish a model with the bytes of `letter` in the run of `key`, for the decision."""

    def make(config, letter, *, better=True, key=None, **options):
        origin = {"grpo.adapter_sha256": letter * 64, "grpo.data_digest": "d" * 64}
        with open_run(config, key=key or letter) as run:
            return offer(run, make_merge(letter), better=better, origin=origin, **options)

    return make


@contextmanager
def killed_at(method, which=lambda *_: True):
    """The block ends in the first call of this method of MLflow's client whose arguments `which` picks."""
    call = getattr(MlflowClient, method)

    def kill(self, *arguments, **options):
        if which(*arguments):
            raise KeyboardInterrupt
        return call(self, *arguments, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(MlflowClient, method, kill)
        with pytest.raises(KeyboardInterrupt):
            yield


def aliases_of(config):
    found = MlflowClient(config.tracking.tracking_uri).get_registered_model(config.registered_model).aliases
    return {alias: str(version) for alias, version in found.items()}


def versions_in(config):
    found = MlflowClient(config.tracking.tracking_uri).search_model_versions(f"name = '{config.registered_model}'")
    return sorted(int(version.version) for version in found)


def flip_byte(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def history(client, run_id, metric):
    """(step, value, timestamp) of every value that the store has of a metric."""
    return [(found.step, found.value, found.timestamp) for found in client.get_metric_history(run_id, metric)]


def artifacts_of(client, run_id, folder=None):
    found = set()
    for entry in client.list_artifacts(run_id, folder):
        found |= artifacts_of(client, run_id, entry.path) if entry.is_dir else {entry.path}
    return found
