"""The artifact of a published model: what MLflow's commands, pyfunc, transformers and OpenAI's clients make of it."""

import json
import os
import subprocess
import sys
import time
import urllib.error
import urllib.request
from contextlib import contextmanager
from pathlib import Path

import mlflow
import pytest
from transformers import AutoModelForCausalLM

from grpo_tasks.content.hashes import folder_sha256
from grpo_tasks.content.tokenizer import set_system_prompt
from grpo_tasks.policy.load import load_tokenizer
from grpo_tasks.tracking.log_model import log_model
from grpo_tasks.tracking.proof import prove_served
from grpo_tasks.tracking.runs import open_run
from schemas.results.model import GreedyAnswer
from tests.flows.place import end_group
from tests.ports import free_ports
from tests.rollout.servers import PYTHON

CHAT = [{"role": "user", "content": "What is 15 + 27?"}]
on_a_server = pytest.mark.parametrize("database", ["server"], indirect=True)
CLIENT = Path(__file__).resolve().parents[1] / "openai_client.py"


@pytest.fixture
def chat_champion(database, make_config, make_merge, offer):
    """Address of a published model whose template carries the system prompt, and its answer to CHAT as the merge proof has it."""
    config, proof = make_config(database), make_merge("system")
    chat = [{"role": "system", "content": config.data.system_prompt}, *CHAT]
    tokenizer = load_tokenizer(proof.model)
    model = AutoModelForCausalLM.from_pretrained(proof.model.path, dtype="float32")
    prompt = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    tokens = model.generate(**prompt, max_new_tokens=64, do_sample=False)[0, prompt["input_ids"].shape[1] :]
    answer = GreedyAnswer(messages=chat, text=tokenizer.decode(tokens, skip_special_tokens=True))
    set_system_prompt(tokenizer, config.data.system_prompt)
    tokenizer.save_pretrained(proof.model.path)
    proof = proof.model_copy(update={"sha256": folder_sha256(Path(proof.model.path)), "answers": [answer]})
    with open_run(config, key="one") as run:
        assert offer(run, proof, log=log_model, prove=prove_served).champion
    return f"models:/{config.registered_model}@champion", answer.text


def environment(server):
    # `mlflow models serve` looks for uvicorn on the PATH.
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    return os.environ | {"PATH": path, "MLFLOW_TRACKING_URI": server, "HF_HUB_OFFLINE": "1", "MLFLOW_DISABLE_TELEMETRY": "true"}


def mlflow_models(command, uri, *options):
    return [sys.executable, "-m", "mlflow", "models", command, "-m", uri, "--env-manager", "local", *options]


@pytest.mark.long
@on_a_server
def test_every_door_of_mlflow_gives_the_answer_of_the_merged_model(database, chat_champion, tmp_path):
    uri, answer = chat_champion
    request = tmp_path / "request.json"
    request.write_text(json.dumps({"messages": CHAT}))
    command = mlflow_models("predict", uri, "--content-type", "json", "-i", str(request), "-o", str(tmp_path / "reply.json"))
    predicted = subprocess.Popen(command, env=environment(database), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    mlflow.set_tracking_uri(database)
    reply = mlflow.pyfunc.load_model(uri).predict({"messages": CHAT})
    assert reply["choices"][0]["message"] == {"role": "assistant", "content": answer}
    pipeline = mlflow.transformers.load_model(uri)
    [said] = pipeline(CHAT, max_new_tokens=64, do_sample=False)
    assert said["generated_text"][-1]["content"] == answer
    info = mlflow.models.get_model_info(uri)
    assert info.metadata == {"task": "llm/v1/chat"}
    assert "messages" in info.signature.inputs.input_names()
    example = mlflow.models.Model.load(uri).load_input_example(mlflow.artifacts.download_artifacts(uri))
    assert example == {"messages": CHAT}
    output, _ = predicted.communicate(timeout=100)
    assert predicted.returncode == 0, output
    assert json.loads((tmp_path / "reply.json").read_text())["choices"][0]["message"]["content"] == answer


@pytest.mark.slow
@on_a_server
def test_the_artifact_holds_weights_once_without_pickle_or_paths(chat_champion, database, tmp_path):
    mlflow.set_tracking_uri(database)
    folder = Path(mlflow.artifacts.download_artifacts(chat_champion[0], dst_path=str(tmp_path / "artifact")))
    names = sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())
    assert [name for name in names if name.endswith((".safetensors", ".bin", ".pt"))] == [
        "adapter/adapter_model.safetensors",
        "model/model.safetensors",
    ]
    # The model is what it was: the same files, for whoever downloads it.
    for name in ("model", "adapter"):
        assert folder_sha256(folder / name) == folder_sha256(tmp_path / "merge-system" / name)
    assert [name for name in names if name.endswith((".pkl", ".pickle"))] == []
    assert [name for name in names if str(tmp_path) in (folder / name).read_bytes().decode(errors="ignore")] == []
    assert "trust_remote_code" not in (folder / "MLmodel").read_text()
    assert not any("+" in line for line in (folder / "requirements.txt").read_text().splitlines())


@contextmanager
def serving(server, uri, tmp_path):
    """Address of `mlflow models serve` for a model."""
    [port] = free_ports(1)
    command = mlflow_models("serve", uri, "--host", "127.0.0.1", "--port", str(port))
    with (tmp_path / "serve.log").open("wb") as log:
        process = subprocess.Popen(command, env=environment(server), stdout=log, stderr=log, start_new_session=True)
    try:
        until_it_answers(f"http://127.0.0.1:{port}/ping", process)
        yield f"http://127.0.0.1:{port}"
    finally:
        end_group(process)


@pytest.mark.long
@on_a_server
def test_a_served_champion_answers_in_the_form_of_openais_api(database, chat_champion, tmp_path):
    uri, answer = chat_champion
    with serving(database, uri, tmp_path) as address:
        # What `OpenAI(base_url="http://127.0.0.1:PORT/invocations?path=")` sends: it appends /chat/completions to its address.
        body = {"messages": CHAT, "model": "demo", "temperature": 0}
        reply = post(f"{address}/invocations?path=/chat/completions", body)
        assert (reply["object"], reply["model"]) == ("chat.completion", uri.removeprefix("models:/").partition("@")[0])
        assert reply["choices"][0] == {"index": 0, "finish_reason": "stop", "message": {"role": "assistant", "content": answer}}
        with pytest.raises(urllib.error.HTTPError) as refused:
            post(f"{address}/invocations", {"messages": CHAT, "stream": True})
        assert refused.value.code == 400
        assert "leave out `stream`" in refused.value.read().decode()
        if not PYTHON.exists():
            pytest.skip("the answers are right; OpenAI's own client needs the vLLM environment (make vllm)")
        asked = [PYTHON, CLIENT, f"{address}/invocations?path=", "demo"]
        said = subprocess.run(asked, check=True, capture_output=True, text=True, timeout=120)
        assert said.stdout == f"{answer}\n"


def post(address, body):
    request = urllib.request.Request(address, json.dumps(body).encode(), {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=60) as reply:
        return json.load(reply)


def until_it_answers(address, process):
    for _ in range(2_000):
        assert process.poll() is None
        try:
            with urllib.request.urlopen(address, timeout=1):
                return
        except OSError:
            time.sleep(0.1)
    raise AssertionError("it does not answer")
