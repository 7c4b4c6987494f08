"""Versions of a registered model: found by number, alias or tags; their lineage; what a person decides about one.

The alias `champion` is on the version in use, `previous` on the one before it, `challenger` on the most recent candidate that was
not promoted. publishing.py registers and promotes versions, models.py downloads their files.
"""

import json
import re
from collections.abc import Mapping
from datetime import UTC, datetime
from functools import partial

from mlflow import MlflowClient
from mlflow.entities import Run
from mlflow.entities.model_registry import ModelVersion

from grpo_tasks.tracking import texts
from grpo_tasks.tracking.description import ENVIRONMENT, MAIN_PACKAGES
from grpo_tasks.tracking.store import Store, open_store, or_none, pages, run_or_none, versions_of
from grpo_tasks.tracking.texts import DECISION_TAG
from schemas.config.operations import TrackingConfig
from schemas.errors import DamagedError, ModelError
from schemas.results.publication import WAITS, Approval, Lineage

CHAMPION, CHALLENGER, PREVIOUS = "champion", "challenger", "previous"
PREFIX = "models:/"
SHA_TAG = "grpo.sha256"
"""Tag of a version, a logged model or a stage's run: SHA-256 over all files of the model."""
HASHES_TAG = "grpo.hashes"
"""Tag of a version with all hashes of its origin in one JSON object: adapter_sha256, data_digest, config_sha256 ..."""
ADAPTER_HASH = "grpo.adapter_sha256"
"""SHA-256 of the weights of a version's last stage: the name in an origin. In `HASHES_TAG` the names have no prefix."""
_PREFIX_OF_HASHES = "grpo."
_HASHES = ("adapter_sha256", "config_sha256", "code_sha256", "reward_sha256")
ROLLED_BACK_TAG = "grpo.rolled_back"
OVERTAKEN = "became champion meanwhile and was not compared with; run again"
"""End of the decision about a version that was compared with an earlier champion."""
APPROVAL_TAG = "grpo.approval"
"""Tag of a version: what a person has decided about it, or has to decide (`Approval` as JSON)."""


def parse_reference(reference: str) -> tuple[str, str, str]:
    """Name, alias and version number of a reference; one of the last two is empty."""
    plain = reference.removeprefix(PREFIX)
    if "@" in plain:
        name, _, alias = plain.partition("@")
        return name, alias, ""
    name, _, number = plain.partition("/")
    return name, "" if number else CHAMPION, number


def find_version(reference: str, tracking: TrackingConfig) -> ModelVersion:
    """The version behind NAME@ALIAS, NAME/VERSION (with or without models:/), or NAME (its champion); else `ModelError`."""
    store, (name, alias, number) = open_store(tracking), parse_reference(reference)
    found = store.call(lambda client: version_or_none(client, name, alias=alias, number=number))
    if found is None:
        missing = is_registered(store, name) and alias == CHAMPION
        said = f"{name} has no champion" if missing else f"no such model: {reference}"
        raise ModelError(said, place=store.uri, fix=_known(store, name))
    return found


def version_or_none(client: MlflowClient, name: str, *, alias: str = "", number: str = "") -> ModelVersion | None:
    """The version with this alias or number; None when there is no such model, alias or version."""
    # SQLite cannot store longer numbers.
    if number and not re.fullmatch("[0-9]{1,9}", number):
        return None
    return or_none(lambda: client.get_model_version(name, number) if number else client.get_model_version_by_alias(name, alias))


def is_registered(store: Store, name: str) -> bool:
    """Whether there is a registered model of this name, with or without versions."""
    return store.call(lambda client: or_none(lambda: client.get_registered_model(name))) is not None


def model_names(client: MlflowClient) -> list[str]:
    """The names of all registered models."""
    return sorted(model.name for model in pages(lambda token: client.search_registered_models(page_token=token)))


def _known(store: Store, name: str) -> str:
    versions = store.call(partial(versions_of, name=name))
    if versions or is_registered(store, name):
        numbers = ", ".join(sorted((str(version.version) for version in versions), key=int)) or "none"
        aliases = store.call(lambda client: client.get_registered_model(name)).aliases
        return f"versions of {name}: {numbers}; aliases: {', '.join(sorted(aliases)) or 'none'}"
    names = store.call(model_names)
    return f"registered models: {', '.join(names) or 'none'}; MLFLOW_TRACKING_URI selects the MLflow server"


def run_of(store: Store, version: ModelVersion) -> Run:
    """The run that made a version. Raises `ModelError` where it was deleted for good (`mlflow gc`)."""
    run = store.call(partial(run_or_none, run_id=version.run_id or ""))
    if run is None:
        raise ModelError(
            f"the run that made version {version.version} of {version.name} was deleted from MLflow, and with it what tells "
            "whether its files are the published ones",
            place=f"{store.uri}, run {version.run_id}",
            fix=f"name another version ({_known(store, version.name)}), or train it again",
        )
    return run


def hashes_tag(origin: Mapping[str, str]) -> dict[str, str]:
    """The origin of a model, such as {"grpo.adapter_sha256": ...}, as one tag."""
    plain = {name.removeprefix(_PREFIX_OF_HASHES): value for name, value in origin.items()}
    return {HASHES_TAG: json.dumps(plain, indent=1, sort_keys=True)} if plain else {}


def hash_of(version: ModelVersion, name: str) -> str:
    """One hash of a version's origin; empty if it has none. Versions of earlier releases have a tag for each."""
    try:
        known = json.loads(version.tags.get(HASHES_TAG, "{}"))
    except ValueError:
        known = {}
    found = known.get(name.removeprefix(_PREFIX_OF_HASHES)) if isinstance(known, dict) else None
    return str(found or version.tags.get(name, ""))


def find_tagged(name: str, tags: Mapping[str, str], tracking: TrackingConfig) -> str | None:
    """The newest version that carries all these tags; None when there is no such version or model."""
    found = open_store(tracking).call(partial(versions_of, name=name))
    carrying = (str(version.version) for version in found if tags.items() <= version.tags.items())
    return max(carrying, key=int, default=None)


def with_bytes(client: MlflowClient, name: str, sha256: str) -> list[ModelVersion]:
    """The versions that are this model, byte for byte."""
    return [version for version in versions_of(client, name) if sha256 and version.tags.get(SHA_TAG) == sha256]


def is_overtaken(name: str, version: str, tracking: TrackingConfig) -> bool:
    """Whether a version has to be compared again: the champion of its comparison was replaced before anything was decided."""
    store = open_store(tracking)
    found = find_version(f"{name}/{version}", tracking)
    if found.tags.get(DECISION_TAG, "").endswith(OVERTAKEN):
        return True
    approval = approval_of(found)
    if approval is None or approval.decision != "pending":
        return False
    current = store.call(lambda client: version_or_none(client, name, alias=CHAMPION))
    return approval.champion != (str(current.version) if current else "")


def tag_version(name: str, version: str, tags: Mapping[str, str], store: Store) -> None:
    """Set tags on a version. Existing tags of the same name are overwritten."""
    for key, value in tags.items():
        store.call(partial(MlflowClient.set_model_version_tag, name=name, version=version, key=key, value=value))


def publish_lock(name: str) -> str:
    """The lock of everything that reads the aliases of a model and then moves them."""
    return f"publish-{name}"


def make_champion(client: MlflowClient, name: str, number: str, aliases: Mapping[str, str]) -> None:
    """Move the aliases to their versions in this order, none to an empty one; the champion is no challenger. Can be repeated.

    `previous` comes first where a kill in between is followed by the same call: once `champion` moves, the old one is not known.
    """
    for alias, version in aliases.items():
        if version:
            client.set_registered_model_alias(name, alias, version)
    if str(client.get_registered_model(name).aliases.get(CHALLENGER)) == number:
        client.delete_registered_model_alias(name, CHALLENGER)


def rollback(name: str, *, to: str | None, reason: str, tracking: TrackingConfig) -> tuple[str, str]:
    """Restore the previous champion, or make version `to` the champion. Returns the version before, and the one now in use."""
    store = open_store(tracking)
    # A run that publishes, or a person who decides, may move the same aliases.
    with store.lock(publish_lock(name), who="a rollback"):
        current = str(find_version(f"{name}@{CHAMPION}", tracking).version)
        target = find_version(f"{name}/{to}" if to else f"{name}@{PREVIOUS}", tracking)
        number = str(target.version)
        if number == current:
            raise ModelError(f"version {number} of {name} is the champion already", fix="name another version with --to")
        record = json.dumps({"time": datetime.now(UTC).isoformat(timespec="seconds"), "to": number, "reason": reason})

        def move(client: MlflowClient) -> None:
            # `champion` moves before `previous`. After a kill between the two, the right model is in use and `previous` names it
            # too. The next rollback is then refused, instead of restoring the version that was just rolled back.
            client.set_model_version_tag(name, current, ROLLED_BACK_TAG, record)
            make_champion(client, name, number, {CHAMPION: number, PREVIOUS: current})
            # The model is wanted again, so its copies that other runs published are not rolled back either.
            copies = with_bytes(client, name, target.tags.get(SHA_TAG, ""))
            for restored, tags in ({str(copy.version): copy.tags for copy in copies} | {number: target.tags}).items():
                if ROLLED_BACK_TAG in tags and restored != current:
                    client.delete_model_version_tag(name, restored, ROLLED_BACK_TAG)
            if texts.says_not_promoted(target.description):
                instead = f"restored instead of version {current}" + (f" ({reason})" if reason else "")
                said = f"{instead}; {target.tags.get(DECISION_TAG, '')}"
                texts.restate_decision(client, target, promoted=True, reason=said)

        store.call(move)
    return current, number


def approval_of(version: ModelVersion) -> Approval | None:
    """What a person has decided about a version; None when nobody was asked."""
    try:
        return Approval.model_validate_json(version.tags.get(APPROVAL_TAG, ""))
    except ValueError:
        return None


PENDING = "waits for approval"


def standings(tracking: TrackingConfig) -> dict[str, str]:
    """NAME/VERSION -> its aliases, or that a person has to decide about it; the other versions are left out."""

    def ask(client: MlflowClient) -> dict[str, str]:
        found = {}
        for name in model_names(client):
            aliases = client.get_registered_model(name).aliases.items()
            for version in versions_of(client, name):
                approval, number = approval_of(version), str(version.version)
                waits = [PENDING] if approval is not None and approval.decision == "pending" else []
                stands = sorted(alias for alias, named in aliases if str(named) == number)
                found[f"{name}/{number}"] = ", ".join([*stands, *waits])
        return {version: what for version, what in found.items() if what}

    return open_store(tracking).call(ask)


def decide_pending(reference: str, approval: Approval, tracking: TrackingConfig, *, sha256: str | None = None) -> str:
    """Record what a person has decided about a version that waits for approval; `promote` makes it the champion.

    `sha256` is that of the model that the person was shown; None: the version itself was. Raises `ModelError` where it waits for
    no decision or another version became champion meanwhile, `DamagedError` where it is not the model that was shown.
    """
    store = open_store(tracking)
    # Another person, or a run that publishes, may decide at the same time: everything is read while the lock is held.
    with store.lock(publish_lock(parse_reference(reference)[0]), who="a decision about a version"):
        version = find_version(reference, tracking)
        name, number = version.name, str(version.version)
        pending = _require_pending(store, version, approval, sha256)
        now = datetime.now(UTC).isoformat(timespec="seconds")
        final = approval.model_copy(update={"champion": pending.champion, "time": now})
        promoted = final.decision == "promote"
        because = version.tags.get(DECISION_TAG, "").removeprefix(WAITS).removeprefix(f"{final}; ")

        def record(client: MlflowClient) -> None:
            if promoted:
                make_champion(client, name, number, {PREVIOUS: final.champion, CHAMPION: number})
            texts.restate_decision(client, version, promoted=promoted, reason=f"{final}; {because}")
            # Last: without it the version still waits, and the same decision can be recorded again.
            client.set_model_version_tag(name, number, APPROVAL_TAG, final.model_dump_json())

        store.call(record)
    return f"{name} version {number}: {final}; {'it is the champion now' if promoted else 'the champion has not changed'}"


def _require_pending(store: Store, version: ModelVersion, approval: Approval, sha256: str | None) -> Approval:
    """What was asked about the version; raises where it waits for no such answer."""
    name, number = version.name, str(version.version)
    if sha256 is not None and version.tags.get(SHA_TAG) != sha256:
        raise DamagedError(
            f"version {number} of {name} is no longer the model that a person was asked about (its SHA-256 differs)",
            place=store.uri,
            fix="somebody changed the version: start the run again; it registers a new one and asks again",
        )
    pending = approval_of(version)
    if pending is None or pending.decision != "pending":
        made = f": it was {pending}" if pending else ""
        fix = f"grpo rollback {name} --to {number} makes any version the champion"
        raise ModelError(f"version {number} of {name} does not wait for approval{made}", place=store.uri, fix=fix)
    current = store.call(lambda client: version_or_none(client, name, alias=CHAMPION))
    champion = str(current.version) if current else ""
    # After a kill, the version may be the champion while its decision is not recorded yet.
    if approval.decision == "promote" and champion not in (pending.champion, number):
        raise ModelError(
            f"version {champion or 'none'} is the champion now, and version {number} was compared with "
            f"{f'version {pending.champion}' if pending.champion else 'none'}",
            place=store.uri,
            fix="start the run again: it compares with the new champion, and skips every other step",
        )
    if approval.decision == "reject" and champion == number:
        raise ModelError(f"version {number} of {name} is the champion already", place=store.uri, fix=f"grpo rollback {name}")
    return pending


def lineage_of(reference: str, tracking: TrackingConfig) -> Lineage:
    """Everything recorded about how a version was made. Raises `ModelError` where this project did not make it."""
    version = find_version(reference, tracking)
    if "grpo.key" not in version.tags or not version.run_id:
        raise ModelError(f"{reference} was not made by this project", fix="name a version with the tag grpo.key")
    store = open_store(tracking)
    run_id, run = version.run_id, run_of(store, version)
    tags = run.data.tags
    environment = json.loads(store.read(run_id, ENVIRONMENT) or "{}")
    packages = environment.get("packages", {})
    return Lineage(
        name=version.name,
        version=str(version.version),
        aliases=sorted(version.aliases),
        run_id=run_id,
        experiment=store.call(lambda client: client.get_experiment(run.info.experiment_id)).name,
        model_sha256=version.tags.get(SHA_TAG, ""),
        data_digest=hash_of(version, "grpo.data_digest") or tags.get("grpo.data_digest", ""),
        **{of: hash_of(version, f"grpo.{of}") for of in _HASHES},
        commit=tags.get("git.commit", ""),
        dirty=tags.get("git.dirty") == "true",
        python=environment.get("python", tags.get("python", "")),
        packages={name: packages[name] for name in MAIN_PACKAGES if name in packages},
        flow_run_id=tags.get("prefect.flow_run_id", ""),
        decision=version.tags.get(DECISION_TAG, ""),
        system_prompt=run.data.params.get("data.system_prompt", ""),
        stop=_recorded_list(run.data.params.get("rollout.stop", "")),
        include_stop_str_in_output=run.data.params.get("rollout.include_stop_str_in_output") != "false",
    )


def _recorded_list(param: str) -> list[str]:
    # Runs of other projects have no such parameter, and one that is too long is in several (description.py).
    return json.loads(param) if param.startswith("[") else []


def recorded_config(lineage: Lineage, tracking: TrackingConfig) -> str:
    """The text of the config.yaml that made a version; raises `ModelError` when the run has lost it."""
    store = open_store(tracking)
    text = store.read(lineage.run_id, "config.yaml")
    if text is None:
        place = f"{store.uri}, run {lineage.run_id}"
        raise ModelError("the run has no config.yaml any more", place=place, fix="put its artifacts back")
    return text
