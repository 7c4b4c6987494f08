"""Publishing a merged model: a version in the registry, and the alias `champion` on the best version.

A process of its own loads the logged model and asks it; one that answers otherwise than the merged model is deleted. A model with
the same bytes (by SHA-256) is reused. The alias moves only if the new model beats the base and the champion it was compared with,
if that is still the champion, and if nobody rolled these bytes back. The old champion becomes `previous`, a candidate that is not
promoted `challenger`.
"""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import tenacity
from mlflow import MlflowClient
from mlflow.entities import LoggedModelStatus
from mlflow.entities.model_registry import ModelVersion
from mlflow.exceptions import MlflowException

from grpo_tasks.content.hashes import files_below
from grpo_tasks.processes.child import prepare_child
from grpo_tasks.tracking import models, registry, texts
from grpo_tasks.tracking.description import describe_environment
from grpo_tasks.tracking.entities import link_to_model
from grpo_tasks.tracking.log_model import LogSpec, default_settings, require_proved
from grpo_tasks.tracking.models import Champion, manifest_path, manifest_sha256
from grpo_tasks.tracking.proof import ServedSpec
from grpo_tasks.tracking.registry import CHAMPION, SHA_TAG
from grpo_tasks.tracking.runs import KEY_TAG, TrackedRun
from grpo_tasks.tracking.store import Store
from schemas.errors import ServedModelError, StoreAwayError, TrackingError
from schemas.results.evaluation import EvalReport, GuardCheck, PairedTest, Regression
from schemas.results.model import MergeProof
from schemas.results.publication import WAITS, Approval

UPLOADS = 3
"""Attempts at the upload of a model before publishing fails; more while the store is away."""
PROVED_TAG = "grpo.served_proof"
LIBRARIES = (
    # First, because it sets environment variables that mlflow reads while it is imported.
    "grpo_tasks.tracking.store",
    "grpo_tasks.tracking.models",
    "mlflow.pyfunc.model",
    "mlflow.transformers",
    "mlflow.store.tracking.sqlalchemy_store",
    "mlflow.store.model_registry.sqlalchemy_store",
    # mlflow asks it for the kind of pipeline.
    "transformers.pipelines",
)
"""What the two child processes need that publish a model: one logs it, one asks it. Importing takes longer than either."""


def prepare_publishing() -> None:
    """Let the fork server import the libraries of both child processes now, in the background (not with a GPU build of torch)."""
    prepare_child(*LIBRARIES)


@dataclass(frozen=True, slots=True)
class Decision:
    """Whether a version is the champion, and why."""

    version: str
    sha256: str
    champion: bool
    reason: str
    awaits_approval: bool = False
    """Whether the version may become the champion as soon as a person agrees."""
    obstacle: str = ""
    """Why it is not the champion, where neither a test nor a check says so: a person, or another champion."""
    rolled_back: bool = False
    """Whether a person rolled its bytes back. Such a version is no challenger either."""


def publish(  # noqa: PLR0913 - what it decides about, and what it is done with
    run: TrackedRun,
    proof: MergeProof,
    *,
    tests: Sequence[PairedTest],
    champion: Champion | None,
    evaluation: EvalReport,
    regressions: Sequence[Regression] = (),
    guards: Sequence[GuardCheck] = (),
    origin: Mapping[str, str] | None = None,
    log: Callable[[LogSpec], None],
    prove: Callable[[ServedSpec], None],
    require_wanted: Callable[[], None] = lambda: None,
) -> Decision:
    """Register the merged model and move the alias if the tests allow it. Repeating it changes nothing.

    `tests` compare the merged model with the base, and with the `champion` where there was one. The figures of its `evaluation`
    become tags of the version, and `origin` has the hashes of its data, code, config and adapter. `log` and `prove` are
    `log_model.log_model` and `proof.prove_served`, or calls of them in separate processes. `require_wanted` raises when somebody
    has ended the run.

    Raises `ServedModelError` where the logged model answers otherwise than the merged one, and `DamagedError` where files differ
    from those that the merge proof covers: nothing was registered.
    """
    name = run.config.registered_model
    _store_manifest(run, proof)
    version = _register(run, name, proof, log, prove, require_wanted)
    current = models.current_champion(run.store, name)
    if registry.ROLLED_BACK_TAG in version.tags and not _is(current, version):
        # A person rolled it back on purpose. Running the same run again must not restore it.
        obstacle = f"version {version.version} was rolled back before"
        return Decision(str(version.version), proof.sha256, False, obstacle, obstacle=obstacle, rolled_back=True)
    checks: list[Regression | GuardCheck] = [*regressions, *guards]
    decision = _decision(run, version, proof, current, tests=tests, compared=champion, regressions=checks)
    is_champion = _is(current, version)
    tags = texts.decision_tags(decision.reason, tests, evaluation, checks) | registry.hashes_tag(origin or {})
    # Publishing the champion again compares it with nothing that it was compared with before it became champion.
    run.store.call(partial(texts.tag_decision, version=version, tags=tags, keep=is_champion))
    if not (is_champion and version.description):
        promoted, reason = decision.champion, decision.reason
        card = texts.model_card(run.config, proof, evaluation, tests=tests, data=run.data, promoted=promoted, reason=reason)
        run.store.call(partial(texts.write_card, name=name, version=decision.version, card=card))
    require_wanted()
    _move_aliases(run.store, name, decision, current)
    return decision


def _is(champion: Champion | None, version: ModelVersion) -> bool:
    return champion is not None and champion.version == str(version.version)


def _decision(
    run: TrackedRun,
    version: ModelVersion,
    proof: MergeProof,
    current: Champion | None,
    *,
    tests: Sequence[PairedTest],
    compared: Champion | None,
    regressions: Sequence[Regression | GuardCheck],
) -> Decision:
    """What the tests, and the person where one has to agree, say about a version now. A new question is put down in its tags."""
    promotion, copies = run.config.promotion, list[str]()
    if not _is(current, version):
        same = run.store.call(lambda client: registry.with_bytes(client, version.name, proof.sha256))
        copies = [str(copy.version) for copy in same if registry.ROLLED_BACK_TAG in copy.tags]
    decision = decide(
        str(version.version),
        proof.sha256,
        tests=tests,
        compared=compared,
        current=current,
        regressions=regressions,
        against_champion=promotion.against_champion,
        rolled_back_as=max(copies, key=int, default=None),
    )
    if promotion.approval == "manual":
        decision = with_approval(decision, registry.approval_of(version), current)
    if decision.awaits_approval:
        pending = Approval(decision="pending", champion=current.version if current else "").model_dump_json()
        registry.tag_version(version.name, decision.version, {registry.APPROVAL_TAG: pending}, run.store)
    if _is(current, version):
        # Report why it became champion, not that it still is.
        decision = replace(decision, reason=version.tags.get(texts.DECISION_TAG, decision.reason))
    return decision


def _store_manifest(run: TrackedRun, proof: MergeProof) -> None:
    """Write the manifest of the files that the merge proof covers into the run's artifacts, unless a valid one is there."""
    manifest = models.manifest_of(Path(proof.model.path))
    require_proved(manifest_sha256(manifest), proof.sha256, Path(proof.model.path))
    stored = run.store.read(run.run_id, manifest_path(proof.sha256))
    known = models.parse_manifest(stored) if stored is not None else None
    if known is not None and manifest_sha256(known) == proof.sha256:
        return
    if stored is not None and run.store.call(lambda _: _versions(run, proof.sha256)):
        raise TrackingError(
            "the manifest in the store is not the one that this model was published with",
            place=f"{run.store.uri}, run {run.run_id}, {manifest_path(proof.sha256)}",
            fix="it was changed: restore it from a backup, or publish in a new run with --fresh",
        )
    # There is none, or a kill interrupted the write. The version comes after the manifest, so no version refers to a broken one.
    run.handle.text(json.dumps(manifest, indent=2), manifest_path(proof.sha256))


def _move_aliases(store: Store, name: str, decision: Decision, current: Champion | None) -> None:
    """Set the aliases that the decision implies. After a kill, the next call makes the same decision and sets them again."""
    if not decision.champion:
        # A model with the champion's bytes is no challenger, and none that a person took back.
        if not decision.rolled_back and (current is None or current.sha256 != decision.sha256):
            store.call(lambda client: client.set_registered_model_alias(name, registry.CHALLENGER, decision.version))
        return
    before = current.version if current else ""
    moves = {} if before == decision.version else {registry.PREVIOUS: before, CHAMPION: decision.version}
    store.call(lambda client: registry.make_champion(client, name, decision.version, moves))


def decide(
    version: str,
    sha256: str,
    *,
    tests: Sequence[PairedTest],
    compared: Champion | None,
    current: Champion | None,
    regressions: Sequence[Regression | GuardCheck] = (),
    against_champion: bool = True,
    rolled_back_as: str | None = None,
) -> Decision:
    """Decide whether a version with these bytes becomes (or stays) champion. A pure function.

    `compared` is the champion of the comparison, `current` that of now. `regressions` can stop a promotion, never cause one.
    `rolled_back_as` is a version with the same bytes that a person rolled back.
    """

    def stopped(obstacle: str, *, rolled_back: bool = False) -> Decision:
        return Decision(version, sha256, False, obstacle, obstacle=obstacle, rolled_back=rolled_back)

    if current is not None and current.version == version:
        return Decision(version, sha256, True, f"version {version} is the champion")
    if rolled_back_as:
        return stopped(f"version {rolled_back_as}, which has the same bytes, was rolled back before", rolled_back=True)
    if current is not None and current.sha256 == sha256:
        return stopped(f"version {version} has the same bytes as the champion, version {current.version}")
    if current is not None and (compared is None or compared.version != current.version):
        return stopped(f"version {current.version} {registry.OVERTAKEN}")
    better, reason = _beats_all(tests, current, against_champion=against_champion)
    worse = [check for check in regressions if not check.passed]
    if worse:
        reason = f"{reason}; {'but ' if better else ''}{'; '.join(map(str, worse))}"
    return Decision(version, sha256, better and not worse, reason)


def with_approval(decision: Decision, approval: Approval | None, current: Champion | None) -> Decision:
    """The decision when a person has to agree. A pure function. An approval counts only for the champion it was given against."""
    champion = current.version if current else ""
    if not decision.champion or champion == decision.version:
        return decision
    if approval is None or approval.decision == "pending" or approval.champion != champion:
        return replace(decision, champion=False, awaits_approval=True, reason=WAITS + decision.reason)
    promoted = approval.decision == "promote"
    return replace(
        decision, champion=promoted, reason=f"{approval}; {decision.reason}", obstacle="" if promoted else str(approval)
    )


def _beats_all(tests: Sequence[PairedTest], current: Champion | None, *, against_champion: bool) -> tuple[bool, str]:
    by_name = {test.against: test for test in tests}

    def said(test: PairedTest, rival: str) -> str:
        verdict = "better" if test.better else "not better"
        return f"{verdict} than {rival}: {test.metric} {test.difference:+.4f} over {test.prompts} prompts, p = {test.p_value:.4g}"

    assert "base" in by_name, "a model is never promoted without a test against the base"
    reason = said(by_name["base"], "the base")
    if not by_name["base"].better:
        return False, reason
    if current is None:
        return True, f"{reason}; there was no champion"
    if not against_champion:
        return True, f"{reason}; not compared with the champion, version {current.version} (promotion.against_champion)"
    assert CHAMPION in by_name, "a champion is never replaced without a test against it"
    return by_name[CHAMPION].better, said(by_name[CHAMPION], f"the champion, version {current.version}")


def _register(
    run: TrackedRun,
    name: str,
    proof: MergeProof,
    log: Callable[[LogSpec], None],
    prove: Callable[[ServedSpec], None],
    require_wanted: Callable[[], None],
) -> ModelVersion:
    known = run.store.call(lambda _: _versions(run, proof.sha256))
    # What a search finds has the id of its logged model in its source only: models:/ID.
    if known and _has_files(run.store, str(known[-1].model_id or str(known[-1].source).rpartition("/")[2]), proof):
        return known[-1]
    run.handle.mark_running()

    def stop_uploading(state: tenacity.RetryCallState) -> bool:
        fault = state.outcome.exception() if state.outcome else None
        waits = isinstance(fault, StoreAwayError) and (state.seconds_since_start or 0.0) < run.store.patience_s
        return state.attempt_number >= UPLOADS and not waits

    # Not `call`: MLflow cannot resume an interrupted upload under the same id, so each attempt makes a new logged model.
    attempts = tenacity.Retrying(
        retry=tenacity.retry_if_exception_type(TrackingError),
        stop=stop_uploading,
        wait=tenacity.wait_exponential(multiplier=0.5, max=10.0),
        reraise=True,
    )
    model_id = attempts(_logged_model, run, proof, log)
    _prove(run, model_id, proof, prove)
    # Uploading and asking take minutes for a large model.
    require_wanted()
    run.require_active()

    def register(client: MlflowClient) -> ModelVersion:
        # Searched in every attempt: the last attempt may have registered the version and lost the reply.
        found = _versions(run, proof.sha256)
        if len(found) > len(known):
            return found[-1]
        about = "Models trained with GRPO. The alias champion moves only to a version that a paired test finds better."
        try:
            client.create_registered_model(name, description=about)
        except MlflowException as fault:
            if fault.error_code != "RESOURCE_ALREADY_EXISTS":
                raise
        tags = {SHA_TAG: proof.sha256, KEY_TAG: run.key}
        return client.create_model_version(name, f"models:/{model_id}", run.run_id, tags=tags, model_id=model_id)

    # The registry of a database store finds the logged model only in mlflow's global store.
    return run.store.call_globally(register)


def _versions(run: TrackedRun, sha256: str) -> list[ModelVersion]:
    ours = f"name = '{run.config.registered_model}' and run_id = '{run.run_id}'"
    found = [version for version in run.store.client.search_model_versions(ours) if version.tags.get(SHA_TAG) == sha256]
    return sorted(found, key=lambda version: int(version.version))


def _logged_model(run: TrackedRun, proof: MergeProof, log: Callable[[LogSpec], None]) -> str:
    """Id of the logged model with these bytes; logged now unless it is there. What interrupted uploads left is deleted."""
    ours = f"source_run_id = '{run.run_id}'"
    whole: list[str] = []
    for model in run.store.call(lambda client: client.search_logged_models([run.experiment_id], ours)):
        if model.tags.get(SHA_TAG) != proof.sha256:
            continue
        if model.status != LoggedModelStatus.READY:
            run.store.call(partial(MlflowClient.delete_logged_model, model_id=model.model_id))
        elif not whole and _has_files(run.store, model.model_id, proof):
            whole.append(model.model_id)
    if whole:
        return whole[0]
    tags = {SHA_TAG: proof.sha256, KEY_TAG: run.key}
    # Created here, because mlflow would create it in the default experiment.
    made = run.store.call(
        lambda client: client.create_logged_model(run.experiment_id, name="model", source_run_id=run.run_id, tags=tags)
    )
    packages = describe_environment().packages
    # What loading the model takes, without the local part of a version: no index has torch 2.13.0+cpu.
    needed = [name for name in ("transformers", "torch", "safetensors") if name in packages]
    log(
        LogSpec(
            tracking=run.config.tracking,
            run_id=run.run_id,
            model_id=made.model_id,
            path=Path(proof.model.path),
            sha256=proof.sha256,
            adapter=proof.policy.adapter,
            adapter_sha256=proof.policy.sha256,
            requirements=[f"{name}=={packages[name].partition('+')[0]}" for name in needed],
            settings=default_settings(run.config),
            example=_as_a_client_asks(run, proof.answers[0].messages) if proof.answers else [],
        )
    )
    return made.model_id


def _has_files(store: Store, model_id: str, proof: MergeProof) -> bool:
    """Whether the store has every file of the model: those of a project that was moved may have stayed behind."""

    def files(client: MlflowClient, folder: str) -> Iterator[str]:
        for item in client.list_logged_model_artifacts(model_id, folder):
            if item.is_dir:
                yield from files(client, item.path)
            else:
                yield item.path

    path = Path(proof.model.path)
    wanted = {f"{models.FOLDER}/{file.relative_to(path).as_posix()}" for file in files_below(path)}
    return wanted <= store.call(lambda client: set(files(client, models.FOLDER)))


def _prove(run: TrackedRun, model_id: str, proof: MergeProof, prove: Callable[[ServedSpec], None]) -> None:
    """Ask the logged model, once; delete it if it answers otherwise than the merged model."""
    if PROVED_TAG in run.store.call(lambda client: client.get_logged_model(model_id)).tags:
        return
    answers = [answer.model_copy(update={"messages": _as_a_client_asks(run, answer.messages)}) for answer in proof.answers]
    try:
        resources = run.config.resources
        prove(ServedSpec(tracking=run.config.tracking, model_id=model_id, answers=answers, num_threads=resources.num_threads))
    except ServedModelError:
        run.store.call(lambda client: client.delete_logged_model(model_id))
        raise
    prompt = run.system_prompt
    if prompt is not None:
        link_to_model(run.handle, prompt, model_id)
    tags = {PROVED_TAG: f"{len(answers)} answers equal those of the merged model"}
    run.store.call(lambda client: client.set_logged_model_tags(model_id, tags))


def _as_a_client_asks(run: TrackedRun, messages: list[dict[str, str]]) -> list[dict[str, str]]:
    """The conversation without the system prompt that the model's chat template adds."""
    system = {"role": "system", "content": run.config.merged_system_prompt}
    return messages[1:] if messages[:1] == [system] and len(messages) > 1 else messages
