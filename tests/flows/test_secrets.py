"""Secrets are planted, and then every byte that a run leaves is searched for them."""

from urllib.parse import quote

import pytest
import yaml

from tests.flows.place import SMALL, end_group, started_mlflow
from tests.ports import free_ports

pytestmark = [pytest.mark.xdist_group("away"), pytest.mark.long]

KEY = """-----BEGIN OPENSSH PRIVATE KEY-----
plantedb3BlbnNzaC1rZXk
plantedQyNTUxOQAAACDf7
-----END OPENSSH PRIVATE KEY-----
"""
PLANTED = {
    "HF_TOKEN": "hf_planted0123456789",
    "OPENAI_API_KEY": "sk-planted-for-this-test",
    "MY_DATABASE_PASSWORD": "planted correct horse",
    "DB_PWD": "planted/with@all:of?it#",
    "MYSQL_PASS": "planted-pass",
    "HF_KEY": "planted0123456789",
    "SSH_PRIVATE_KEY": KEY,
}
IN_ADDRESS = "planted/in@add:ress"
IN_SOURCE = ["T00000000/B00000000/plantedplantedplantedplan", "hf_" + "Planted0123456789Planted012345"]
"""Written into a module of the user's, which is recorded too; nothing in the environment says that they are secrets."""
LEAKY = f"""
HOOK = "https://hooks.slack.com/services/{IN_SOURCE[0]}"
KEY = "{IN_SOURCE[1]}"
"""
LEAKY += """
import os
import re


NAMES = ["DB_PWD", "MYSQL_PASS", "HF_KEY", "SSH_PRIVATE_KEY", "HF_TOKEN", "MY_DATABASE_PASSWORD"]


def leaky(completions, **columns):
    print("posted to", HOOK, "as", KEY, "with", os.environ["HF_TOKEN"])
    if os.environ.get("BREAK"):
        raise RuntimeError(" was refused, ".join(os.environ[name] for name in NAMES) + " was refused")
    right = re.compile("<reasoning>[^<]+</reasoning><answer>-?[0-9]+</answer>")
    return [float(right.fullmatch(one[0]["content"]) is not None) for one in completions]
"""


def test_a_planted_secret_is_in_no_log_no_parameter_and_no_artifact(lone_place, tmp_path_factory):
    servers = tmp_path_factory.mktemp("mlflow")
    [port] = free_ports(1)
    mlflow = started_mlflow(servers, port)
    place = lone_place
    place.write("leaky.py", LEAKY)
    rewards = {"functions": {"mine": {"function": "leaky:leaky", "weight": 0.1}}}
    stages = [SMALL["stages"][0] | {"rewards": ["format", "mine"]}]
    place.write("small.yaml", yaml.safe_dump(SMALL | {"rewards": rewards, "stages": stages}))
    variables = PLANTED | {
        "MLFLOW_TRACKING_URI": f"http://me:{quote(IN_ADDRESS, safe='')}@127.0.0.1:{port}",
        "PYTHONPATH": str(place.root),
    }
    try:
        done = place.start("run", "small.yaml", **variables)
        output = done.communicate(timeout=900)[0]
        assert done.returncode == 0, output
        failed = place.start("run", "small.yaml", "--fresh", **variables, BREAK="1")
        output += failed.communicate(timeout=900)[0]
        assert failed.returncode == 1, output
        assert "was refused" in output
    finally:
        end_group(mlflow)
        gone = place.start("validate", "small.yaml", "--set", "tracking.patience_s=1", **variables)
        output += gone.communicate(timeout=900)[0]
    assert gone.returncode == 1, output
    assert "me:***@127.0.0.1" in output

    kept = {path: path.read_bytes() for root in (place.root, servers) for path in root.rglob("*") if path.is_file()}
    assert any(path.name == "prefect.db" for path in kept)
    assert any(path.name == "mlflow.db" for path in kept)
    for secret in IN_SOURCE:
        assert secret not in output
        found = [path for path, content in kept.items() if secret.encode() in content]
        assert {path.name for path in found} <= {"leaky.py"}, found
        assert all(path.is_relative_to(place.root) for path in found), "what is uploaded has none"
    lines = KEY.splitlines()[1:-1]
    for secret in [*PLANTED.values(), *lines, IN_ADDRESS, quote(IN_ADDRESS, safe="")]:
        assert secret not in output
        assert not [path for path, content in kept.items() if secret.encode() in content]
