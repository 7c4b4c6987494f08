"""A stage sent to nodes, trained there and collected; without Ray, whose part is the transport between these objects."""

import json
import shutil
import time

import pytest

from grpo_tasks.cluster import messages, placement
from grpo_tasks.cluster.connect import cluster_address
from grpo_tasks.cluster.inbox import Inbox
from grpo_tasks.cluster.node import Gang, StageNode, interface_of, interfaces
from grpo_tasks.cluster.outbox import Outbox
from grpo_tasks.cluster.parcel import NodeFiles, pack
from grpo_tasks.cluster.versions import Versions, own_versions, require_equal
from grpo_tasks.content.hashes import file_sha256
from grpo_tasks.stage.checkpoint import MANIFEST
from grpo_tasks.stage.run import run_stage
from grpo_tasks.stage.stage_dir import StageDir, StageSpec
from schemas.errors import ClusterError, ConfigError
from tests.docs.pages import DOCS


def train_on_nodes(spec, directory, count):
    """What the supervisor does, with calls in place of messages."""
    directory.mkdir()
    there = StageDir(directory)
    nodes = [StageNode("127.0.0.1", {}) for _ in range(count)]
    parcel = pack(spec, there)
    for node in nodes:
        missing = node.missing(parcel.files)
        for file in parcel.files:
            if file.sha256 in missing:
                node.receive(file, 0, file.source.read_bytes())
    port = nodes[0].free_port()
    started = [node.start(parcel, "grpo_tasks.grpo", Gang("127.0.0.1", port, i, 1, count), ()) for i, node in enumerate(nodes)]
    inbox = Inbox(there, spec, started[0])
    while True:
        reports = [node.report() for node in nodes]
        for node, report in zip(nodes, reports, strict=True):
            inbox.apply(report.delta, node.read, node.release)
        codes = [code for report in reports for code in report.codes]
        assert not any(codes), there.log.read_text()[-3000:]
        if None not in codes and all(report.delta.is_empty for report in reports):
            return nodes
        time.sleep(0.1)


@pytest.mark.long
@pytest.mark.parametrize("count", [pytest.param(1, marks=pytest.mark.ci), 2])
def test_nodes_train_the_bytes_of_as_many_local_processes(stages, tmp_path, monkeypatch, count):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    settings = {"max_steps": 2, "save_steps": 1, "log_completions_steps": 1}
    spec = StageSpec.load(stages.write("a", resources={"num_processes": count}, **settings).spec)
    here, there = tmp_path / "here", tmp_path / "there"
    local = run_stage(spec, here)
    train_on_nodes(spec, there, count)
    remote = type(local).load(StageDir(there).result)
    assert (remote.sha256, remote.model.sha256, remote.steps) == (local.sha256, local.model.sha256, 2)
    assert (remote.directory, remote.model.adapter) == (there, there / "final")
    assert [json.loads(line)["step"] for line in StageDir(there).journal.read_text().splitlines()] == [1, 2]
    files = [{p.relative_to(top).as_posix() for p in top.rglob("*") if p.is_file()} - {"spec.json"} for top in (here, there)]
    assert files[0] == files[1]


def test_content_travels_once_and_is_checked(stages, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    directory = stages.write("a")
    parcel = pack(StageSpec.load(directory.spec), directory)
    first, second = NodeFiles(tmp_path / "one"), NodeFiles(tmp_path / "two")
    (file, *_) = parcel.files
    assert first.missing(parcel.files) == {file.sha256}
    with pytest.raises(ClusterError, match="changed while it was sent"):
        first.receive(file, 0, b"x" * file.size)
    content = file.source.read_bytes()
    first.receive(file, 0, content[:100])
    assert first.missing(parcel.files)
    first.receive(file, 100, content[100:])
    assert second.missing(parcel.files) == set()


def checkpoint(directory, step):
    folder = directory.checkpoints / f"step-{step:06d}"
    folder.mkdir(parents=True)
    (folder / "state.json").write_text(str(step))
    (folder / MANIFEST).write_text(json.dumps({"state.json": file_sha256(folder / "state.json")}))
    return folder


@pytest.fixture
def mail(stages, tmp_path):
    """A stage directory on a node with its outbox, and the inbox of the driver."""
    sender, receiver = StageDir(tmp_path / "node"), stages.write("driver")
    sender.root.mkdir()
    return Outbox(sender, everything=True), Inbox(receiver, StageSpec.load(receiver.spec), "")


def test_the_best_weights_arrive_before_the_checkpoint_that_counts_on_them(mail):
    outbox, inbox = mail
    checkpoint(outbox.directory, 2)
    outbox.directory.best.mkdir()
    (outbox.directory.best / "weights").write_text("best")

    def killed(name, *where):
        if name.startswith("checkpoints"):
            raise KeyboardInterrupt
        return outbox.read(name, *where)

    with pytest.raises(KeyboardInterrupt):
        inbox.apply(outbox.collect(), killed, outbox.release)
    assert (inbox.directory.best / "weights").read_text() == "best"


def test_old_checkpoints_go_when_new_ones_are_here_and_never_all_of_them(mail):
    outbox, inbox = mail
    for step, deleted in ((2, None), (4, 2)):
        checkpoint(outbox.directory, step)
        if deleted:
            shutil.rmtree(outbox.directory.checkpoints / f"step-{deleted:06d}")
        inbox.apply(outbox.collect(), outbox.read, outbox.release)
        assert [path.name for path in inbox.directory.checkpoints.iterdir()] == [f"step-{step:06d}"]
    # Somebody tidies /tmp on the node.
    shutil.rmtree(outbox.directory.checkpoints)
    inbox.apply(outbox.collect(), outbox.read, outbox.release)
    assert [path.name for path in inbox.directory.checkpoints.iterdir()] == ["step-000004"]


@pytest.mark.parametrize("left", [[], [MANIFEST], ["state.json"]], ids=["nothing", "manifest", "state"])
def test_a_checkpoint_that_is_being_deleted_while_it_is_collected_does_not_arrive(mail, left):
    outbox, inbox = mail
    for file in [*checkpoint(outbox.directory, 2).iterdir()]:
        if file.name not in left:
            file.unlink()
    checkpoint(outbox.directory, 4)
    inbox.apply(outbox.collect(), outbox.read, outbox.release)
    assert [path.name for path in inbox.directory.checkpoints.iterdir()] == ["step-000004"]


def test_nothing_incomplete_stays_of_a_driver_that_was_killed(mail):
    _, inbox = mail
    for folder in (inbox.directory.root, inbox.directory.checkpoints, inbox.directory.completions(1).parent):
        (folder / ".x.part").mkdir(parents=True)
    inbox.clear()
    assert not list(inbox.directory.root.rglob(".*.part"))


def test_ranks_meet_on_the_interface_of_the_address_that_ray_knows():
    assert interface_of("127.0.0.1") == "lo"
    assert interface_of("203.0.113.7") == ""


def test_gloo_and_nccl_use_that_interface_unless_the_environment_names_another_one(monkeypatch):
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    monkeypatch.delenv("NCCL_SOCKET_IFNAME", raising=False)
    assert interfaces("127.0.0.1") == {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "=lo"}
    assert interfaces("203.0.113.7") == {}
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "ib")
    assert interfaces("127.0.0.1") == {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "ib"}


def test_a_node_that_differs_is_refused_by_name():
    own = own_versions()
    require_equal([("same", own)])
    other = Versions(own.python, own.libraries | {"torch": "1.0"}, "0" * 64)
    with pytest.raises(ClusterError, match=r"odd: torch 1.0 instead of .*, our code 000000000000 instead of"):
        require_equal([("odd", other), ("same", own)])
    # Two nodes on one machine have one name.
    with pytest.raises(ClusterError, match=r"host: torch 1.0 instead of"):
        require_equal([("host", other), ("host", own)])


def test_a_cluster_that_nobody_names_is_refused(monkeypatch):
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    with pytest.raises(ConfigError, match="no cluster is named"):
        cluster_address("")
    with pytest.raises(ConfigError, match="member of the cluster"):
        cluster_address("ray://head:10001")


def test_what_a_trial_pass_measured_comes_back_and_goes_along_when_the_stage_resumes(stages, tmp_path):
    there, node = stages.write("driver"), StageDir(tmp_path / "node")
    node.root.mkdir()
    outbox = Outbox(node, everything=True)
    outbox.begin()
    node.token_budget.write_text('{"tokens": 512}')
    [held] = outbox.collect().held
    assert (held.name, outbox.read(held.name, "", 0, 99)) == ("token_budget.json", b'{"tokens": 512}')
    there.token_budget.write_text('{"tokens": 512}')
    parcel = pack(StageSpec.load(there.spec), there)
    assert "token_budget.json" in {file.target for file in parcel.files}


def test_the_page_names_the_limits_of_the_code_and_of_ray():
    config = pytest.importorskip("ray._raylet").Config
    text = " ".join((DOCS / "gpus.md").read_text().split())
    failures, timeout_s = config.health_check_failure_threshold(), config.health_check_timeout_ms() / 1000
    period_s = config.health_check_period_ms() / 1000
    for figure in (
        f"at most {messages.ANSWER_S:g} seconds: the driver asks each node",
        f"its part of the stage starts | at most {messages.START_S / 60:g} minutes",
        f"too small for {placement.JOIN_S / 60:g} minutes",
        f"after {failures} health checks that failed for {timeout_s:g} seconds each, {period_s:g} seconds apart",
    ):
        assert figure in text, figure
