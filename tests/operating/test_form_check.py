"""A run with bad parameters is refused before it exists: every field at once, cross-field rules and overrides included."""

import asyncio
import base64
import json
import uuid

import pytest
import yaml

from grpo_tasks.operating.guarded_servers import FormCheck, parameter_faults
from tests.flows.place import SMALL

PATH = f"/api/deployments/{uuid.uuid4()}/create_flow_run"


def post(parameters, path=PATH, parts=3, password=None, given=None):
    """Send a request in several parts; what came back, and whether the app behind the check got the whole body."""
    body, sent, got = json.dumps({"parameters": parameters}).encode(), [], []
    size = len(body) // parts + 1
    chunks = [body[start : start + size] for start in range(0, len(body), size)]
    queue = [{"type": "http.request", "body": chunk, "more_body": chunk is not chunks[-1]} for chunk in chunks]

    async def app(scope, receive, send):
        more = True
        while more:
            message = await receive()
            got.append(message["body"])
            more = message["more_body"]
        await send({"type": "http.response.start", "status": 201, "headers": []})

    async def receive():
        return queue.pop(0)

    async def send(message):
        sent.append(message)

    headers = [(b"authorization", b"Basic " + base64.b64encode(given.encode()))] if given else []
    scope = {"type": "http", "method": "POST", "path": path, "headers": headers}
    asyncio.run(FormCheck(app, password)(scope, receive, send))
    return sent, b"".join(got) == body


def test_every_bad_field_and_rule_over_fields_is_named_with_its_place():
    stage = SMALL["stages"][0] | {"learning_rate": -1.0}
    sent, passed = post({"config": SMALL | {"seed": -1, "sead": 3, "stages": [stage]}})
    assert sent[0]["status"] == 409
    detail = json.loads(sent[1]["body"])["detail"]
    for place in ("config.seed", "config.sead", "config.stages.0.learning_rate"):
        assert place in detail
    assert not passed
    found = faults(config=SMALL | {"stages": [SMALL["stages"][0] | {"num_generations": 3}]})
    assert found.startswith("config.stages.0")
    assert "num_generations" in found


def test_a_good_form_reaches_prefect_unchanged_and_so_does_every_other_request():
    assert post({"config": SMALL}) == ([{"type": "http.response.start", "status": 201, "headers": []}], True)
    assert post({"config": SMALL | {"seed": -1}}, path="/api/flow_runs/filter")[1]


@pytest.mark.parametrize(
    "body", [b"", b"[]", b"{}", b"\xff", b'{"parameters": 3}', b'{"parameters": {"config": "x"}}', b"[" * 9999]
)
def test_what_is_no_form_is_left_to_prefect(body):
    assert parameter_faults(body) == []


def faults(**parameters):
    return "\n".join(parameter_faults(json.dumps({"parameters": parameters}).encode()))


def test_overrides_of_a_preset_are_checked_with_it():
    # A template is filled in by the server.
    template = {"__prefect_kind": "jinja", "template": "{{ event.payload.overrides }}"}
    assert faults(source="demo", overrides=template) == ""
    assert faults(source="demo", overrides=["seed=3"]) == ""
    assert "seed" in faults(source="demo", overrides=["seed=-1"])
    assert "did you mean" in faults(source="demo", overrides=["stages.0.learning_rat=1"])


def test_only_files_of_the_users_own_folder_are_read(tmp_path, monkeypatch):
    (tmp_path / "own").mkdir()
    monkeypatch.chdir(tmp_path / "own")
    for folder in (tmp_path, tmp_path / "own"):
        (folder / "bad.yaml").write_text(yaml.safe_dump(SMALL | {"seed": -1}))
    assert faults(source="bad.yaml") == "", "a server for others reads no files"
    monkeypatch.setenv("GRPO_WORKDIR", str(tmp_path / "own"))
    assert "seed" in faults(source="bad.yaml")
    assert faults(source="../bad.yaml") == faults(source=str(tmp_path / "bad.yaml")) == ""


def test_a_server_with_a_password_reveals_no_files(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("GRPO_WORKDIR", str(tmp_path))
    (tmp_path / "notes.txt").write_text("not a config")
    form = {"source": "notes.txt"}
    for given in (None, "me:wrong"):
        sent, passed = post(form, password="me:secret", given=given)
        assert (sent[0]["status"], passed) == (201, True), "Prefect behind the check refuses it"
    assert post(form, password="me:secret", given="me:secret")[0][0]["status"] == 409


@pytest.mark.parametrize(
    ("over", "seeds", "fault"),
    [
        (["stages.0.learning_rat=1e-3,3e-4"], 1, "did you mean"),
        (["stages.0.learning_rate=1e-3,-1"], 1, "learning_rate"),
        (["stages.0.learning_rate"], 1, "has no values"),
        (["seed=1,1"], 1, "given twice"),
        (["stages.0.learning_rate=1e-3,3e-4"], 900, "1000"),
        ([], 1, "one run is no sweep"),
        (None, 1, "one run is no sweep"),
    ],
)
def test_every_run_of_a_sweep_is_checked_before_the_sweep_is_made(over, seeds, fault):
    form = {"source": "demo", "overrides": [], "seeds": seeds}
    assert fault in faults(**form, over=over).replace(",", "")
    assert faults(**form | {"seeds": 1}, over=["stages.0.learning_rate=1e-3,3e-4"]) == ""


def test_an_unknown_stage_is_named_with_the_known_ones():
    assert faults(config=SMALL, stage="format") == ""
    assert faults(config=SMALL, stage="formt") == "stage: no stage formt in this config; one of format"
