"""The model registry: a version per published model, and the alias `champion` on the best of them.

    merged folder --log by path--> logged model --register--> version --paired tests--> alias champion | stays

The folder is logged as files, its weights are never loaded. A model that this run logged or registered before (same bytes, by
SHA-256) is taken up again. The alias moves only if the new model beats the base and the champion it was compared with is still
the champion; the one before becomes `previous`, a candidate that was not promoted `challenger`. What it does not do: evaluate;
the tests come from the evaluation room.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import tenacity
from mlflow import MlflowClient
from mlflow.entities import LoggedModel, LoggedModelStatus
from mlflow.entities.model_registry import ModelVersion
from mlflow.exceptions import MlflowException

from grpo_tasks.tracking.downloads import (
    fetch_version,
    manifest_of,
    manifest_path,
    manifest_sha256,
    parse_manifest,
    read_manifest,
    stored_manifest,
)
from grpo_tasks.tracking.environment import describe_environment
from grpo_tasks.tracking.log_model import LogSpec
from grpo_tasks.tracking.registry import CHALLENGER, CHAMPION, PREVIOUS, find_version
from grpo_tasks.tracking.runs import TrackedRun
from grpo_tasks.tracking.store import Store, open_store
from schemas.config.operations import TrackingConfig
from schemas.errors import DamagedError, TrackingError
from schemas.results import EvalReport, MergeProof, ModelRef, PairedTest, Regression

SHA_TAG = "grpo.sha256"
_REQUIREMENTS = ("transformers", "torch", "safetensors")
UPLOADS = 3
"""Times that the upload of a model is begun before a run gives up."""


@dataclass(frozen=True, slots=True)
class Champion:
    """The version that carries the alias."""

    version: str
    sha256: str
    """Over all files of its model folder, as in `MergeProof`; empty for a version that somebody else registered."""
    run_id: str


@dataclass(frozen=True, slots=True)
class Decision:
    """Where a model stands in the registry now, and why."""

    version: str
    sha256: str
    champion: bool
    reason: str


def find_champion(name: str, tracking: TrackingConfig) -> Champion | None:
    """The present champion of a registered model; None when there is no such model or no alias."""
    return _find_champion(open_store(tracking), name)


def check_champion(name: str, tracking: TrackingConfig) -> None:
    """Refuse, before anything is trained, a champion that a new model could not be compared with.

    Raises:
        ModelError: the version behind the alias was not published by this project, or its manifest was changed.
        TrackingError: the store cannot be reached.
    """
    store = open_store(tracking)
    champion = _find_champion(store, name)
    if champion is not None:
        read_manifest(store, find_version(f"{name}/{champion.version}", tracking))


def fetch_champion(name: str, tracking: TrackingConfig, directory: Path) -> tuple[Champion, ModelRef] | None:
    """The present champion, its files below `directory`, verified (and fetched once per version); None when there is none.

    Raises:
        ModelError: the version was not published by this project, or something is not what was published.
        TrackingError: the store cannot be reached.
    """
    champion = _find_champion(open_store(tracking), name)
    if champion is None:
        return None
    return champion, download_model(f"models:/{name}/{champion.version}", tracking, directory)


def publish(
    run: TrackedRun,
    proof: MergeProof,
    *,
    tests: Sequence[PairedTest],
    champion: Champion | None,
    evaluation: EvalReport,
    regressions: Sequence[Regression] = (),
    origin: Mapping[str, str] | None = None,
    log: Callable[[LogSpec], None],
) -> Decision:
    """Register the merged model and move the alias if the tests say so. Repeating it changes nothing.

    Args:
        run: the parent run; the model is logged to it and the version links to it.
        proof: the merge; its sha256 is the model's identity.
        tests: ours against base, and against `champion` where there is one (`against` says which).
        champion: the champion that was compared with; None when there was none.
        evaluation: of the merged model; its figures become tags of the version.
        regressions: what ours must not be worse in.
        origin: further tags of the version, that say what made it.
        log: logs the model's files; `log_model.log_model`, or that in a process of its own.

    Raises:
        DamagedError: the files are not those that the merge proof saw; nothing was registered.
        TrackingError: the store cannot be reached or refuses; publishing again continues where it stopped.
    """
    name = run.config.registered_model
    _store_manifest(run, proof)
    version = _register(run, name, proof, log)
    current = _find_champion(run.store, name)
    if "grpo.rolled_back" in version.tags:
        # Somebody took it out of use on purpose; the same run again must not bring it back.
        return Decision(str(version.version), proof.sha256, False, f"version {version.version} was rolled back before")
    decision = decide(
        str(version.version), proof.sha256, tests=tests, compared=champion, current=current, regressions=regressions
    )
    _tag(run, name, decision, tests, evaluation, regressions, origin or {})
    _move_aliases(run.store, name, decision, current)
    if decision.champion and current is not None and current.version == decision.version:
        # What made it champion is the reason worth telling, not that it still is.
        return replace(decision, reason=version.tags.get("grpo.decision", decision.reason))
    return decision


def _store_manifest(run: TrackedRun, proof: MergeProof) -> None:
    """Write the manifest of the files that the merge proof saw into the run's artifacts, once; a valid one stays as it is."""
    manifest = manifest_of(Path(proof.model.path))
    if manifest_sha256(manifest) != proof.sha256:
        raise DamagedError(
            "the merged model is not what the merge proof saw (its SHA-256 differs)",
            place=proof.model.path,
            fix="run the same command again: the merge runs again; nothing was published",
        )
    stored = stored_manifest(run.store, run.run_id, proof.sha256)
    known = parse_manifest(stored) if stored is not None else None
    if known is not None and manifest_sha256(known) == proof.sha256:
        return
    if stored is not None and run.store.ask(lambda _: _versions(run, run.config.registered_model, proof.sha256)):
        raise TrackingError(
            "the manifest in the store is not the one that this model was published with",
            place=f"{run.store.uri}, run {run.run_id}, {manifest_path(proof.sha256)}",
            fix="somebody changed it: restore it from a backup, or publish in a new run with --fresh",
        )
    # There is none yet, or a kill has torn it before anything was registered with it.
    run.handle.text(json.dumps(manifest, indent=2), manifest_path(proof.sha256))


def _move_aliases(store: Store, name: str, decision: Decision, current: Champion | None) -> None:
    """The aliases as the decision wants them. Killed in between, the same decision is made and carried out again."""
    if not decision.champion:
        # The same bytes as the champion are no challenger to it.
        if current is None or current.sha256 != decision.sha256:
            store.ask(lambda client: client.set_registered_model_alias(name, CHALLENGER, decision.version))
        return
    if current is not None and current.version != decision.version:
        # `previous` first: once the champion has moved, nobody knows any more who it was.
        store.ask(lambda client: client.set_registered_model_alias(name, PREVIOUS, current.version))
    if current is None or current.version != decision.version:
        store.ask(lambda client: client.set_registered_model_alias(name, CHAMPION, decision.version))
    aliases = store.ask(lambda client: client.get_registered_model(name)).aliases
    if str(aliases.get(CHALLENGER)) == decision.version:
        store.ask(lambda client: client.delete_registered_model_alias(name, CHALLENGER))


def decide(
    version: str,
    sha256: str,
    *,
    tests: Sequence[PairedTest],
    compared: Champion | None,
    current: Champion | None,
    regressions: Sequence[Regression] = (),
) -> Decision:
    """Whether a version becomes (or stays) champion, in one sentence. A pure function of its arguments.

    Args:
        version: the new version's number.
        sha256: the new model's.
        tests: against base, and against champion where one was compared with.
        compared: the champion of the comparison.
        current: the champion now; another one than `compared` means that somebody moved the alias meanwhile.
        regressions: checks that each can only keep the alias where it is.
    """

    def decided(champion: bool, reason: str) -> Decision:
        return Decision(version, sha256, champion, reason)

    if current is not None and current.version == version:
        return decided(True, f"version {version} is the champion")
    if current is not None and current.sha256 == sha256:
        return decided(False, f"version {version} has the same bytes as the champion, version {current.version}")
    if current is not None and (compared is None or compared.version != current.version):
        return decided(False, f"version {current.version} became champion meanwhile and was not compared with; run again")
    better, reason = _beats_all(tests, current)
    worse = [check for check in regressions if not check.passed]
    if better and worse:
        return decided(False, f"{reason}; but {'; '.join(_say_worse(check) for check in worse)}")
    return decided(better, reason)


def _beats_all(tests: Sequence[PairedTest], current: Champion | None) -> tuple[bool, str]:
    by_name = {test.against: test for test in tests}
    assert "base" in by_name, "a model is never promoted without a test against the base"
    verdict = "better" if by_name["base"].better else "not better"
    reason = f"{verdict} than the base: {_say(by_name['base'])}"
    if not by_name["base"].better:
        return False, reason
    if current is None:
        return True, f"{reason}; there was no champion"
    assert CHAMPION in by_name, "a champion is never replaced without a test against it"
    verdict = "better" if by_name[CHAMPION].better else "not better"
    return by_name[CHAMPION].better, f"{verdict} than the champion, version {current.version}: {_say(by_name[CHAMPION])}"


def _say_worse(check: Regression) -> str:
    return f"{check.metric} {check.ours:.4g} against {check.theirs:.4g} of the {check.against}, limit {check.limit:.4g}"


def _say(test: PairedTest) -> str:
    return f"{test.metric} {test.difference:+.4f} over {test.prompts} prompts, p = {test.p_value:.4g}"


def _find_champion(store: Store, name: str) -> Champion | None:
    def work() -> ModelVersion | None:
        try:
            return store.client.get_model_version_by_alias(name, CHAMPION)
        except MlflowException as fault:
            # MLflow answers "no such model" and "no such alias" with these; anything else is a fault.
            if fault.error_code in {"RESOURCE_DOES_NOT_EXIST", "INVALID_PARAMETER_VALUE"}:
                return None
            raise

    found = store.ask(lambda _: work())
    if found is None:
        return None
    return Champion(version=str(found.version), sha256=found.tags.get(SHA_TAG, ""), run_id=found.run_id or "")


def _register(run: TrackedRun, name: str, proof: MergeProof, log: Callable[[LogSpec], None]) -> ModelVersion:
    """The version of this run with these bytes, made if there is none."""
    known = run.store.ask(lambda _: _versions(run, name, proof.sha256))
    if known:
        return known[-1]
    run.handle.wake()
    # An upload that broke off cannot be taken up again under the same id.
    again = tenacity.retry_if_exception_type(TrackingError)
    model_id = tenacity.Retrying(retry=again, stop=tenacity.stop_after_attempt(UPLOADS), reraise=True)(
        _logged_model, run, proof, log
    )

    def work() -> ModelVersion:
        # Looked for again in every attempt: the answer to the one before may have been lost on the way.
        found = _versions(run, name, proof.sha256)
        if found:
            return found[-1]
        _create_model(run.store, name)
        tags = {SHA_TAG: proof.sha256, "grpo.key": run.key, "grpo.merge_key": proof.key}
        # The registry of a database store looks the logged model up in mlflow's global store.
        with run.store.as_default():
            return run.store.client.create_model_version(name, f"models:/{model_id}", run.run_id, tags=tags, model_id=model_id)

    return run.store.ask(lambda _: work())


def _versions(run: TrackedRun, name: str, sha256: str) -> list[ModelVersion]:
    """The versions that this run made of these bytes, oldest first."""
    found = run.store.client.search_model_versions(f"name = '{name}' and run_id = '{run.run_id}'")
    return sorted((version for version in found if version.tags.get(SHA_TAG) == sha256), key=lambda version: int(version.version))


def _create_model(store: Store, name: str) -> None:
    try:
        store.client.create_registered_model(name)
    except MlflowException as fault:
        if fault.error_code != "RESOURCE_ALREADY_EXISTS":
            raise


def _logged_model(run: TrackedRun, proof: MergeProof, log: Callable[[LogSpec], None]) -> str:
    """Id of the logged model with these bytes; logged now unless an attempt before got it there whole. Halves are taken away."""
    found: Sequence[LoggedModel] = run.store.ask(
        lambda client: client.search_logged_models([run.experiment_id], f"source_run_id = '{run.run_id}'")
    )
    ours = [model for model in found if model.tags.get(SHA_TAG) == proof.sha256]
    for half in (model for model in ours if model.status != LoggedModelStatus.READY):
        run.store.ask(lambda client, half=half: client.delete_logged_model(half.model_id))  # type: ignore[misc]
    whole = next((model for model in ours if model.status == LoggedModelStatus.READY), None)
    return whole.model_id if whole else _log_folder(run, proof, log)


def _log_folder(run: TrackedRun, proof: MergeProof, log: Callable[[LogSpec], None]) -> str:
    packages = describe_environment().packages
    tags = {SHA_TAG: proof.sha256, "grpo.key": run.key}
    # Made first, because mlflow would put it into the default experiment.
    made = run.store.ask(
        lambda client: client.create_logged_model(run.experiment_id, name="model", source_run_id=run.run_id, tags=tags)
    )
    log(
        LogSpec(
            tracking=run.config.tracking,
            run_id=run.run_id,
            model_id=made.model_id,
            path=Path(proof.model.path),
            sha256=proof.sha256,
            requirements=[f"{name}=={packages[name]}" for name in _REQUIREMENTS if name in packages],
        )
    )
    return made.model_id


def download_model(uri: str, tracking: TrackingConfig, directory: Path) -> ModelRef:
    """The model of `models:/NAME@ALIAS` or `models:/NAME/VERSION` below `directory`, verified; fetched once per version.

    Raises:
        ModelError: there is no such model, or something is not what was published.
        TrackingError: the store cannot be reached.
    """
    version = find_version(uri, tracking)
    # Two stores may both have a version 3 of the same name.
    target = directory / f"{version.name}-{version.version}-{(version.run_id or 'none')[:8]}"
    folder = fetch_version(version, tracking, target, ours=True)
    return ModelRef(path=str(folder), sha256=version.tags[SHA_TAG])


def _tag(
    run: TrackedRun,
    name: str,
    decision: Decision,
    tests: Sequence[PairedTest],
    evaluation: EvalReport,
    regressions: Sequence[Regression],
    origin: Mapping[str, str],
) -> None:
    """The numbers of the decision and what made the model on the version itself, where the registry shows them."""
    tags = {"grpo.decision": decision.reason, **origin}
    for check in regressions:
        tags[f"against_{check.against}.{check.metric}"] = f"{check.theirs:.6g} (limit {check.limit:.6g})"
    for test in tests:
        tags[f"against_{test.against}.difference"] = f"{test.difference:.6g}"
        tags[f"against_{test.against}.p_value"] = f"{test.p_value:.6g}"
    for metric, interval in evaluation.metrics.items():
        tags[metric] = f"{interval.value:.6g}"
    present = run.store.ask(lambda client: client.get_model_version(name, decision.version)).tags
    for key, value in tags.items():
        if key not in present:
            # The first decision stands: publishing again finds "is the champion", which is no reason.
            run.store.ask(partial(_set_tag, name=name, version=decision.version, key=key, value=value))


def _set_tag(client: MlflowClient, *, name: str, version: str, key: str, value: str) -> None:
    client.set_model_version_tag(name, version, key, value)
