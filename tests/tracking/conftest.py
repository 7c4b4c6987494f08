"""Real stores: an SQLite file per test, and one `mlflow server` on 127.0.0.1 for the session."""

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import numpy as np
import polars as pl
import pytest
from cryptography.fernet import Fernet
from mlflow import MlflowClient
from safetensors.numpy import save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from grpo_tasks.content.hashes import folder_sha256
from grpo_tasks.operating.commands import mlflow_command
from grpo_tasks.stage.stage_dir import StageDir, StageSpec
from grpo_tasks.tracking.log_model import log_model
from grpo_tasks.tracking.models import current_champion
from grpo_tasks.tracking.publishing import publish
from grpo_tasks.tracking.runs import open_run
from grpo_tasks.tracking.served.proof import prove_served
from grpo_tasks.tracking.store import open_store
from schemas.config.run import RunConfig
from schemas.results.data import DataReport, LabCheck, LabReport, RuleCount, SignalForecast, TokenLengths
from schemas.results.evaluation import EvalReport, Interval, PairedTest
from schemas.results.model import GreedyAnswer, MergeProof, ModelRef, RefusedPrecision, StageResult

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
    """Address of a real server with one worker."""
    home = tmp_path_factory.mktemp("server")
    shutil.copy(empty_database, home / "server.db")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", *mlflow_command(port)]
    command += ["--backend-store-uri", f"sqlite:///{home / 'server.db'}", "--artifacts-destination", str(home / "artifacts")]
    environment = os.environ | {"MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false", "MLFLOW_DISABLE_TELEMETRY": "true"}
    # For webhooks to this machine, each heard of at once.
    environment |= {"MLFLOW_WEBHOOK_ALLOWED_SCHEMES": "http", "MLFLOW_WEBHOOK_ALLOW_PRIVATE_IPS": "true"}
    environment |= {"MLFLOW_WEBHOOK_SECRET_ENCRYPTION_KEY": Fernet.generate_key().decode(), "MLFLOW_WEBHOOK_CACHE_TTL": "0"}
    with (home / "server.log").open("wb") as log:
        process = subprocess.Popen(command, cwd=home, env=environment, stdout=log, stderr=log, start_new_session=True)
    try:
        _wait_until_healthy(f"http://127.0.0.1:{port}/health", process, home / "server.log")
        yield f"http://127.0.0.1:{port}"
    finally:
        os.killpg(process.pid, signal.SIGTERM)
        process.wait(timeout=20)


def _wait_until_healthy(address, process, log):
    for _ in range(240):
        assert process.poll() is None, log.read_text()
        try:
            with urllib.request.urlopen(address, timeout=1) as answer:
                if answer.status == 200:
                    return
        except OSError:
            time.sleep(0.25)
    raise AssertionError(f"the server did not come up: {log.read_text()}")


@pytest.fixture
def database(request, empty_database, tmp_path, monkeypatch):
    """Uri of an SQLite store for this test, its artifacts in the same folder; the server's uri if parametrised with "server"."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    if getattr(request, "param", "sqlite") == "server":
        return request.getfixturevalue("server")
    shutil.copy(empty_database, tmp_path / "mlflow.db")
    return f"sqlite:///{tmp_path / 'mlflow.db'}"


@pytest.fixture(params=["database", "server"])
def any_store(request):
    """A test with this fixture runs on both kinds of store."""
    return request.getfixturevalue(request.param)


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
    pl.DataFrame(
        {"probe": ["perfect", "megabyte"], "completion": ["ok", "z" * 1_000_000], "scores": [[1.0], [0.0]], "format": [1.0, 0.0]}
    ).write_parquet(directory / "probes.parquet")
    (directory / "report.md").write_text("# Lab\n")
    return LabReport(
        key="e" * 16,
        directory=directory,
        seconds=1.0,
        checks=[LabCheck(function="format", check="order", outcome="passed")],
        forecasts=[SignalForecast(stage="format", groups=16, share_with_signal=0.75, mean_reward=0.4, mean_reward_std=0.2)],
    )


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
        report = EvalReport(
            key=key,
            directory=directory,
            seconds=1.0,
            label=label,
            model=ModelRef(path="embedded:base"),
            prompts=2,
            num_samples=1,
            temperature=1.0,
            confidence=0.95,
            metrics={"accuracy": interval, "format_rate": interval, "greedy_accuracy": interval, "lenient_accuracy": interval},
            pass_at_k={1: interval, 4: interval},
        )
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
    """A merged model on disk: a copy of the embedded base model."""
    base = BASE

    def make(letter="7", key="9" * 16):
        """Models with different letters differ in one file that is not loaded."""
        directory = tmp_path / f"merge-{letter}"
        shutil.copytree(base, directory / "model", dirs_exist_ok=True)
        (directory / "model" / "letter.txt").write_text(letter)
        (directory / "adapter").mkdir(exist_ok=True)
        for name, text in (("adapter_config.json", "{}"), ("adapter_model.safetensors", f"weights {letter}")):
            (directory / "adapter" / name).write_text(text)
        policy = ModelRef(path=str(BASE), adapter=directory / "adapter", sha256=folder_sha256(directory / "adapter"))
        return MergeProof(
            key=key,
            directory=directory,
            seconds=1.0,
            model=ModelRef(path=str(directory / "model")),
            policy=policy,
            sha256=folder_sha256(directory / "model"),
            dtype="float16",
            prompts=8,
            kept=0.9876,
            kept_weights=0.998,
            base_kl=1e-4,
            merged_kl=1e-8,
            merge_difference=1e-6,
            max_logprob_difference=1e-6,
            mean_logprob_difference=1e-7,
            base_logprob_difference=1e-3,
            tolerance=1e-3,
            greedy_agreement=1.0,
            base_greedy_agreement=0.5,
            refused=[RefusedPrecision(dtype="bfloat16", kept_weights=0.24, reason="it keeps 24 % of the change of the weights")],
            size_bytes=1_300_000,
            answers=base_answers,
        )

    return make


def verdict(against, better):
    return PairedTest(
        against=against, metric="accuracy", prompts=64, difference=0.1, p_value=0.01 if better else 0.5, better=better
    )


@pytest.fixture
def publish_one(make_config, make_merge, make_evaluation):
    """Publish a model with the bytes of `letter`, better than the current champion or not, in the run of `key`."""

    def make(uri, letter, *, better=True, config=None, key=None):
        config = config or make_config(uri)
        champion = current_champion(open_store(config.tracking), config.registered_model)
        tests = [verdict("base", True)] + ([verdict("champion", better)] if champion else [])
        origin = {"grpo.adapter_sha256": letter * 64, "grpo.data_digest": "d" * 64}
        with open_run(config, key=key or letter) as run:
            publish(
                run,
                make_merge(letter),
                tests=tests,
                champion=champion,
                evaluation=make_evaluation("merged"),
                origin=origin,
                log=log_model,
                prove=prove_served,
            )
        return config

    return make


def published(config, make_evaluation, proof, key="run"):
    with open_run(config, key=key) as run:
        tests, evaluation = [verdict("base", True)], make_evaluation("merged")
        return publish(run, proof, tests=tests, champion=None, evaluation=evaluation, log=log_model, prove=prove_served)


def flip_byte(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def history(client, run_id, metric):
    """(step, value, timestamp) of every value that the store has of a metric."""
    return [(found.step, found.value, found.timestamp) for found in client.get_metric_history(run_id, metric)]
