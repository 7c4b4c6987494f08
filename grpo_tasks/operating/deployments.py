"""`python -m grpo_tasks.operating.deployments FILE`: the work pool and all deployments of a prefect.yaml.

`prefect deploy --all` makes every deployment what the file says. What users change in the Prefect UI goes into a copy of the file
first: schedules, paused or not, parameters (except `config`, whose preset may be newer), triggers switched on or off, the pool.
"""

import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml
from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.client.schemas.filters import DeploymentFilter, DeploymentFilterName
from prefect.exceptions import ObjectNotFound

POOL, TAG = "grpo", "grpo"
"""The work pool of the deployments, and the tag that each of them has."""
PRESET = "config"


def keep_user_changes(tree: Mapping[str, Any], client: SyncPrefectClient) -> dict[str, Any]:
    """The content of a prefect.yaml with what users have changed on the server."""
    entries = []
    for entry in tree["deployments"]:
        named = DeploymentFilter(name=DeploymentFilterName(any_=[entry["name"]]))
        # Somebody else's deployment may have the same name.
        found = next((each for each in client.read_deployments(deployment_filter=named) if TAG in each.tags), None)
        if found is None:
            entries.append(entry)
            continue
        # Without schedules in the file, Prefect leaves those of the deployment as they are.
        kept = {name: value for name, value in entry.items() if name != "schedules"}
        # Only parameters that the file knows: a release may have dropped others.
        given = {name: value for name, value in found.parameters.items() if name in entry["parameters"] and name != PRESET}
        kept |= {"paused": found.paused, "parameters": entry["parameters"] | given}
        if "triggers" in kept:
            triggers = client.read_resource_related_automations(f"prefect.deployment.{found.id}")
            switches = {each.name: each.enabled for each in triggers}
            kept["triggers"] = [each | {"enabled": switches.get(each["name"], each["enabled"])} for each in kept["triggers"]]
        entries.append(kept)
    return {**tree, "deployments": entries}


def _prefect(*arguments: str) -> int:
    return subprocess.run([sys.executable, "-m", "prefect", "--no-prompt", *arguments], check=False).returncode


def main(file: Path) -> int:
    """Create the pool if there is none, and apply the deployments on the server that PREFECT_API_URL names; the exit status."""
    with get_client(sync_client=True) as client, tempfile.TemporaryDirectory() as folder:
        try:
            client.read_work_pool(POOL)
        except ObjectNotFound:
            if failed := _prefect("work-pool", "create", POOL, "--type", "process"):
                return failed
        merged = Path(folder) / "prefect.yaml"
        tree = keep_user_changes(yaml.safe_load(file.read_text(encoding="utf-8")), client)
        merged.write_text(yaml.safe_dump(tree, sort_keys=False, allow_unicode=True), encoding="utf-8")
        return _prefect("deploy", "--prefect-file", str(merged), "--all")


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
