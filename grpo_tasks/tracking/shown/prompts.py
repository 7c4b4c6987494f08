"""The system prompt in MLflow's prompt registry: a version for each text, linked to the runs and models that used it."""

import re
from functools import partial

from mlflow import MlflowClient

from grpo_tasks.tracking.handle import RunHandle
from grpo_tasks.tracking.store import pages

LONGEST = 50_000
"""Characters of a prompt that the registry takes. A longer one is a parameter of the run only."""
PROMPT_TAG = "system_prompt"
"""Tag of a run: name and version of its system prompt."""


def record_system_prompt(run: RunHandle, name: str, text: str | None) -> str | None:
    """Register the text, unless a version has it, and link it to the run.

    Args:
        run: the parent run.
        name: of the registered model; the prompt is called NAME-system-prompt.
        text: the system prompt.

    Returns:
        NAME/VERSION of the prompt; None without a system prompt.
    """
    if not text or len(text) > LONGEST:
        return None
    prompt = re.sub(r"[^\w.-]", "-", f"{name}-system-prompt", flags=re.ASCII)
    with run.store.lock(f"prompt-{prompt}", who=f"a run that registers the prompt {prompt}"):
        version = run.store.ask(partial(_version, name=prompt, text=text, experiment_id=run.experiment_id, run=run))
        if not run.has(f"prompt.{prompt}.{version}"):
            run.once(f"prompt.{prompt}.{version}", lambda: run.store.ask(partial(_link, run=run, name=prompt, version=version)))
    return f"{prompt}/{version}"


def link_to_model(run: RunHandle, prompt: str, model_id: str) -> None:
    """Link NAME/VERSION of a prompt to a logged model."""
    name, _, version = prompt.rpartition("/")

    def work(client: MlflowClient) -> None:
        with run.store.as_default():
            client.link_prompt_version_to_model(name, version, model_id)

    run.store.ask(work)


def _version(client: MlflowClient, *, name: str, text: str, experiment_id: str, run: RunHandle) -> str:
    """The newest version with this text; registered now if there is none."""
    with run.store.as_default():
        if client.get_prompt(name) is not None:
            versions = pages(lambda token: client.search_prompt_versions(name, page_token=token))
            same = [str(known.version) for known in versions if known.template == text]
            if same:
                return max(same, key=int)
        made = client.register_prompt(name, text, commit_message="system prompt of a training")
        # MLflow shows a prompt in the experiment that is active in this process, which is not the run's.
        client.set_prompt_tag(name, "_mlflow_experiment_ids", f",{experiment_id},")
        return str(made.version)


def _link(client: MlflowClient, *, run: RunHandle, name: str, version: str) -> None:
    with run.store.as_default():
        client.link_prompt_version_to_run(run.run_id, f"prompts:/{name}/{version}")
    run.tags({PROMPT_TAG: f"{name}/{version}"})
