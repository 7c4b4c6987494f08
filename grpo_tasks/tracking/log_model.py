"""`python -m grpo_tasks.tracking.log_model DIRECTORY`: upload the files of a merged model to MLflow; spec.json names it.

    merged folder -> MLmodel           flavors python_function (chat_model.py) and transformers, signature of llm/v1/chat
                     model/            the merged folder as it is: both flavors load it
                     adapter/          the adapter that was merged, in float32, whatever the precision of the model
                     chat_model.py     how it answers, as code (nothing is pickled)
                     input_example.json, serving_input_example.json, requirements.txt, ...

A separate process, forked from one that has transformers loaded: mlflow imports all of transformers only to copy a folder.
"""

from collections.abc import Sequence
from pathlib import Path
from shutil import copyfile, copytree
from typing import Any

import mlflow.pyfunc
import mlflow.transformers
from mlflow.models import Model
from pydantic import Field

from grpo_tasks.content.hashes import folder_sha256
from grpo_tasks.kit.progress import Progress, report
from grpo_tasks.processes.child import SPEC, run_child
from grpo_tasks.tracking.models import ADAPTER, FOLDER
from grpo_tasks.tracking.store import FAULTS, open_store
from schemas.config.operations import TrackingConfig
from schemas.config.run import RunConfig
from schemas.errors import DamagedError
from schemas.prompts import PLAIN
from schemas.results.base import Result

CODE = "chat_model.py"
"""The model's code: the file of an artifact, and of this room."""


class LogSpec(Result):
    """Which model is logged, and to which store."""

    tracking: TrackingConfig
    run_id: str
    model_id: str
    """Id of an existing logged model."""
    path: Path
    sha256: str
    """Expected SHA-256 over all files of the folder. A folder that differs is not logged."""
    adapter: Path | None = None
    """Folder of the adapter that was merged; None after full fine-tuning."""
    adapter_sha256: str | None = None
    """Expected SHA-256 over all files of the adapter's folder; None for an adapter from elsewhere."""
    requirements: list[str]
    settings: dict[str, Any] = Field(default_factory=dict)
    """How the model generates where a request says nothing (chat_model.py lists the settings)."""
    example: list[dict[str, str]] = Field(default_factory=list)
    """A held-out prompt, shown as the input example."""


def log_model(spec: LogSpec) -> None:
    """Upload the folder under the model's id, which MLflow allows once. `DamagedError` unless the merge proof covers it."""
    store = open_store(spec.tracking, known=True)
    require_proved(folder_sha256(spec.path), spec.sha256, spec.path)
    if spec.adapter is not None and spec.adapter_sha256 is not None:
        require_proved(folder_sha256(spec.adapter), spec.adapter_sha256, spec.adapter, what="adapter")
    report(Progress("uploading the model"))
    try:
        with store.as_default():
            # Model.log calls `save_model` of its flavor, with an MLmodel that already names run and model id.
            Model.log(None, _Flavor, model_id=spec.model_id, run_id=spec.run_id, spec=spec, validate_serving_input=False)
    except FAULTS as fault:
        raise store.error(fault) from fault
    # Checked again: the folder may have changed while it was uploaded.
    try:
        require_proved(folder_sha256(spec.path), spec.sha256, spec.path)
    except DamagedError:
        store.call(lambda client: client.delete_logged_model(spec.model_id))
        raise


class _Flavor:
    """What MLflow expects of the module of a flavor."""

    @staticmethod
    def save_model(path: str, mlflow_model: Model, spec: LogSpec, **_: object) -> None:
        """Write the artifact to the new folder `path`: the transformers flavor, and a pyfunc flavor on the same files."""
        prompt = example_request(spec.example)
        mlflow.transformers.save_model(
            # Absolute, because mlflow would ask the hub for the model card of a path that looks like OWNER/NAME.
            str(spec.path.resolve()),
            path,
            mlflow_model=mlflow_model,
            task="llm/v1/chat" if "messages" in prompt else "llm/v1/completions",
            input_example=prompt,
            # Given, because mlflow would load the model in a new process to find out.
            pip_requirements=spec.requirements,
        )
        copyfile(Path(__file__).with_name(CODE), Path(path) / CODE)
        written = mlflow_model.flavors["python_function"]
        mlflow.pyfunc.add_to_model(
            mlflow_model,
            loader_module="mlflow.pyfunc.model",
            conda_env=written["env"]["conda"],
            python_env=written["env"]["virtualenv"],
            model_config=spec.settings,
            model_code_path=CODE,
            artifacts={FOLDER: {"path": FOLDER, "uri": FOLDER}},
        )
        if spec.adapter is not None:
            copytree(spec.adapter, Path(path) / ADAPTER)
        # It says that no licence was found, with the path on this machine. The model card names the licence of the base.
        (Path(path) / "LICENSE.txt").unlink(missing_ok=True)
        # Where the model lay on this machine concerns nobody else.
        mlflow_model.flavors["transformers"]["source_model_name"] = str(spec.settings.get("name", FOLDER))
        mlflow_model.save(str(Path(path) / "MLmodel"))


def example_request(prompt: Sequence[dict[str, str]]) -> dict[str, Any]:
    """A request with this prompt, in the form of llm/v1/chat, or of llm/v1/completions for a plain prompt."""
    if prompt and prompt[0]["role"] == PLAIN:
        return {"prompt": prompt[0]["content"]}
    return {"messages": [dict(message) for message in prompt] or [{"role": "user", "content": "Hello"}]}


def default_settings(config: RunConfig) -> dict[str, str | int | float | bool | list[str] | list[int | str]]:
    """How the published model generates where a request says nothing: greedily, with the limits and the stops of the training."""
    rollout = config.rollout
    return {
        "name": config.registered_model,
        "max_tokens": rollout.max_completion_length,
        "temperature": 0.0,
        "top_p": rollout.top_p,
        "top_k": rollout.top_k,
        "min_p": rollout.min_p,
        "repetition_penalty": rollout.repetition_penalty,
        "stop": list(rollout.stop),
        "include_stop": rollout.include_stop_str_in_output,
        "stop_token_ids": list(rollout.stop_token_ids),
        "device": "auto",
        "dtype": "auto",
    }


def require_proved(sha256: str, proved: str, folder: Path, *, what: str = "merged model") -> None:
    """Raise `DamagedError` unless a folder's SHA-256 is the one that the merge proof covers."""
    if sha256 != proved:
        raise DamagedError(
            f"the {what} differs from the one that the merge proof covers (other SHA-256)",
            place=str(folder),
            fix="run the same command again: the merge runs again; nothing was published",
        )


def main(directory: Path) -> None:
    """Log the model that the folder's spec names."""
    log_model(LogSpec.load(directory / SPEC))


if __name__ == "__main__":
    run_child(main)
