"""A flow refuses a working directory that Prefect deletes, or whose name is an unresolved variable, before it makes anything."""

import tempfile
from pathlib import Path

import pytest
from prefect.utilities.importtools import import_object

from flows.deployments import deployments
from flows.preflight import check_working_directory
from schemas.errors import ConfigError

DEPLOYMENTS = {deployment.name: deployment for deployment in deployments()}


@pytest.fixture(params=["{temporary}/tmpa1b2c3prefect", "{temporary}/runner_storage/a1b2", "{own}/{{{{ $GRPO_WORKDIR }}}}"])
def lost(request, tmp_path, monkeypatch):
    """A working directory whose content would be lost."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    folder = Path(request.param.format(temporary=tmp_path / "temporary", own=tmp_path / "own"))
    folder.mkdir(parents=True)
    monkeypatch.chdir(folder)
    return folder


@pytest.mark.parametrize("name", DEPLOYMENTS)
def test_every_flow_refuses_it_and_makes_nothing(name, lost):
    flow = import_object(DEPLOYMENTS[name].flow)
    parameters = DEPLOYMENTS[name].parameters | ({"adapter": "some/adapter"} if name in ("merge", "publish") else {})
    with pytest.raises(ConfigError, match="results would be lost") as refused:
        flow.fn(**flow.validate_parameters(parameters))
    assert refused.value.place == str(lost)
    assert "GRPO_WORKDIR" in refused.value.fix
    assert list(lost.iterdir()) == []


def test_the_message_names_the_unresolved_variable(lost):
    with pytest.raises(ConfigError) as refused:
        check_working_directory()
    assert "{{ $GRPO_WORKDIR }}" in str(refused.value) or "temporary" in refused.value.message


@pytest.mark.parametrize("folder", ["tmp-of-mine", "prefect", "runs/tmpa1b2prefect"])
def test_other_folders_below_the_temporary_folder_are_fine(folder, tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    (tmp_path / folder).mkdir(parents=True)
    monkeypatch.chdir(tmp_path / folder)
    check_working_directory()


def test_the_names_are_those_that_prefect_gives():
    from prefect.runner import _workspace_starter, runner
    from prefect.workers import process

    assert 'TemporaryDirectory(suffix="prefect")' in Path(process.__file__).read_text()
    assert '"runner_storage"' in Path(runner.__file__).read_text()
    assert 'prefix="prefect-workspace-' in Path(_workspace_starter.__file__).read_text()
