"""A stage sent to nodes, trained there and collected; without Ray, whose part is the transport between these objects."""

import json
import shutil
import time
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest

from grpo_tasks.cluster import jobs, placement
from grpo_tasks.cluster.connect import Versions, cluster_address, own_versions, require_equal
from grpo_tasks.cluster.jobs import Job, JobNode, interfaces
from grpo_tasks.cluster.mirror import Inbox, Outbox
from grpo_tasks.cluster.parcel import NodeFiles
from grpo_tasks.cluster.stage import MIRRORED, rank_environments, spec_at, stage_files, store
from grpo_tasks.content.hashes import file_sha256
from grpo_tasks.kit.files import unfinished_path
from grpo_tasks.stage.checkpoint import MANIFEST
from grpo_tasks.stage.run import run_stage
from grpo_tasks.stage.stage_dir import StageDir, StageSpec
from schemas.errors import ClusterError, ConfigError
from tests.docs.pages import DOCS


def train_on_node(spec, directory):
    """What the supervisor does, with calls in place of jobs."""
    directory.mkdir()
    there, node = StageDir(directory), JobNode("127.0.0.1")
    files = stage_files(spec, there)
    missing = node.missing(files)
    for file in files:
        if file.key in missing:
            node.receive(file, 0, file.source.read_bytes())
    node.lay_out(files)
    facts = node.describe()
    here = spec_at(facts.root, spec, files, ranks=1)
    environments = rank_environments(facts.address, node.free_port(), 0, 1, 1)
    node.start(Job("grpo_tasks.grpo", "", here.model_dump_json(), MIRRORED, environments))
    inbox = Inbox(directory, MIRRORED, partial(store, there, spec, node.resolve(here.start.path)))
    while True:
        report = node.report()
        inbox.apply(report.delta, node.read, node.release)
        assert not any(report.codes), there.log.read_text()[-3000:]
        if None not in report.codes and report.delta.is_empty:
            return
        time.sleep(0.1)


@pytest.mark.long
@pytest.mark.ci
def test_a_node_trains_the_bytes_of_a_local_process(stages, tmp_path, monkeypatch):
    """Two nodes with two local processes are in test_stage.py."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    settings = {"max_steps": 2, "save_steps": 1, "log_completions_steps": 1}
    spec = StageSpec.load(stages.write("a", **settings).spec)
    here, there = tmp_path / "here", tmp_path / "there"
    local = run_stage(spec, here)
    train_on_node(spec, there)
    remote = type(local).load(StageDir(there).result)
    assert (remote.sha256, remote.model.sha256, remote.steps) == (local.sha256, local.model.sha256, 2)
    assert (remote.directory, remote.model.adapter) == (there, there / "final")
    assert [json.loads(line)["step"] for line in StageDir(there).journal.read_text().splitlines()] == [1, 2]
    files = [{p.relative_to(top).as_posix() for p in top.rglob("*") if p.is_file()} - {"spec.json"} for top in (here, there)]
    assert files[0] == files[1]


def test_content_travels_once_and_is_checked(stages, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    directory = stages.write("a")
    files = stage_files(StageSpec.load(directory.spec), directory)
    first, second = NodeFiles(tmp_path / "one"), NodeFiles(tmp_path / "two")
    (file, *_) = files
    assert first.missing(files) == {file.sha256}
    with pytest.raises(ClusterError, match="changed while it was sent"):
        first.receive(file, 0, b"x" * file.size)
    content = file.source.read_bytes()
    first.receive(file, 0, content[:100])
    assert first.missing(files)
    first.receive(file, 100, content[100:])
    assert second.missing(files) == set()


def checkpoint(directory, step):
    folder = directory.checkpoints / f"step-{step:06d}"
    folder.mkdir(parents=True)
    (folder / "state.json").write_text(str(step))
    (folder / MANIFEST).write_text(json.dumps({"state.json": file_sha256(folder / "state.json")}))
    return folder


@pytest.fixture
def mail(stages, tmp_path):
    """A stage directory on a node with its outbox, and that of the driver with the inbox."""
    sender, receiver = StageDir(tmp_path / "node"), stages.write("driver")
    sender.root.mkdir()
    inbox = Inbox(receiver.root, MIRRORED, partial(store, receiver, StageSpec.load(receiver.spec), ""))
    return SimpleNamespace(sender=sender, outbox=Outbox(sender.root, MIRRORED), receiver=receiver, inbox=inbox)


def deliver(mail):
    mail.inbox.apply(mail.outbox.collect(), mail.outbox.read, mail.outbox.release)


def test_the_best_weights_arrive_before_the_checkpoint_that_counts_on_them(mail):
    checkpoint(mail.sender, 2)
    mail.sender.best.mkdir()
    (mail.sender.best / "weights").write_text("best")

    def killed(name, *where):
        if name.startswith("checkpoints"):
            raise KeyboardInterrupt
        return mail.outbox.read(name, *where)

    with pytest.raises(KeyboardInterrupt):
        mail.inbox.apply(mail.outbox.collect(), killed, mail.outbox.release)
    assert (mail.receiver.best / "weights").read_text() == "best"


@pytest.mark.parametrize("moment", range(6))
def test_what_counts_on_others_never_arrives_before_them(mail, monkeypatch, moment):
    """The trainer writes better weights, and a checkpoint that counts on them, at any moment of a collection."""
    glob, calls = Path.glob, []

    def found(folder, pattern):
        if folder == mail.sender.root:
            if len(calls) == moment:
                mail.sender.best.mkdir()
                (mail.sender.best / "weights").write_text("best")
                checkpoint(mail.sender, 4)
            calls.append(pattern)
        return glob(folder, pattern)

    monkeypatch.setattr(Path, "glob", found)
    mail.inbox.apply(mail.outbox.collect(), mail.outbox.read, mail.outbox.release)
    assert mail.receiver.best.exists() or not (mail.receiver.checkpoints / "step-000004").exists()
    assert len(calls) == len(MIRRORED.complete)


def test_old_checkpoints_go_when_new_ones_are_complete(mail):
    for step, deleted in ((2, None), (4, 2)):
        checkpoint(mail.sender, step)
        if deleted:
            shutil.rmtree(mail.sender.checkpoints / f"step-{deleted:06d}")
        deliver(mail)
        assert [path.name for path in mail.receiver.checkpoints.iterdir()] == [f"step-{step:06d}"]
    # Somebody tidies /tmp on the node.
    shutil.rmtree(mail.sender.checkpoints)
    deliver(mail)
    assert [path.name for path in mail.receiver.checkpoints.iterdir()] == ["step-000004"]


@pytest.mark.parametrize("left", [[], [MANIFEST], ["state.json"]], ids=["nothing", "manifest", "state"])
def test_a_checkpoint_deleted_while_it_is_collected_does_not_arrive(mail, left):
    for file in [*checkpoint(mail.sender, 2).iterdir()]:
        if file.name not in left:
            file.unlink()
    checkpoint(mail.sender, 4)
    deliver(mail)
    assert [path.name for path in mail.receiver.checkpoints.iterdir()] == ["step-000004"]


def test_nothing_incomplete_stays_of_a_driver_that_was_killed(mail):
    there = mail.receiver
    for path in (there.result, there.best, there.checkpoints / "step-000002", there.completions(1)):
        unfinished_path(path).mkdir(parents=True)
    Inbox(there.root, MIRRORED)
    assert not list(there.root.rglob(".*.part"))


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


def test_measurements_of_a_trial_pass_come_back_on_resume(stages, tmp_path):
    there, node = stages.write("driver"), StageDir(tmp_path / "node")
    node.root.mkdir()
    outbox = Outbox(node.root, MIRRORED)
    node.token_budget.write_text('{"tokens": 512}')
    [held] = outbox.collect().held
    assert (held.name, outbox.read(held.name, "", 0, 99)) == ("token_budget.json", b'{"tokens": 512}')
    there.token_budget.write_text('{"tokens": 512}')
    assert "token_budget.json" in {file.target for file in stage_files(StageSpec.load(there.spec), there)}


def test_the_page_names_the_limits_of_the_code():
    text = " ".join((DOCS / "gpus.md").read_text().split())
    for figure in (
        f"at most {jobs.ANSWER_S:g} seconds: the driver asks each node",
        f"its part of the stage starts | at most {jobs.START_S / 60:g} minutes",
        f"too small for {placement.JOIN_S / 60:g} minutes",
    ):
        assert figure in text, figure
