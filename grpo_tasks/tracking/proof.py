"""`python -m grpo_tasks.tracking.proof DIRECTORY`: does the artifact in the store answer as the merged model did?

The artifact is what a user gets: it comes from the store, and this project's packages cannot be imported while it loads and
answers. It answers in float32 on the CPU, as in the merge proof; a shorter precision could turn a near tie.
"""

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.machinery import ModuleSpec
from pathlib import Path
from tempfile import TemporaryDirectory
from types import ModuleType
from typing import Any

import mlflow.artifacts
import mlflow.pyfunc

from grpo_tasks.kit.progress import Count, Progress, report
from grpo_tasks.processes.child import SPEC, run_child
from grpo_tasks.tracking.log_model import example_request
from grpo_tasks.tracking.store import Store, open_store
from schemas.config.operations import ResourcesConfig, TrackingConfig
from schemas.errors import OUR_PACKAGES, ServedModelError
from schemas.results.base import Result
from schemas.results.model import PROOF_TOKENS, GreedyAnswer

_FIX = "run the same command again: the model is uploaded and asked again; nothing was registered"
_SHOWN_CHARS = 300


class ServedSpec(Result):
    """Which logged model is asked, and what it must answer."""

    tracking: TrackingConfig
    model_id: str
    answers: list[GreedyAnswer]
    """Prompts as a client sends them, with the answers of the merge proof."""
    num_threads: int | None = None
    """As in `resources`."""


def prove_served(spec: ServedSpec) -> None:
    """Load the logged model by pyfunc and ask it. Raises `ServedModelError` where it cannot be loaded, or an answer differs."""
    store = open_store(spec.tracking, known=True)
    place = f"{store.uri}, models:/{spec.model_id}"
    # The answers of the merge proof know no stop strings: generate() has them only by call.
    settings = {"device": "cpu", "dtype": "float32", "max_tokens": PROOF_TOKENS, "temperature": 0.0, "stop": []}
    with _artifact(store, spec.model_id) as folder:
        try:
            with _without_our_packages():
                report(Progress("loading the published model"))
                model = mlflow.pyfunc.load_model(str(folder), model_config=settings)
                replies, count = list[Any](), Count("asking the published model", len(spec.answers), "prompts")
                for answer in spec.answers:
                    replies.append(model.predict(example_request(answer.messages))["choices"][0])
                    count.add()
                given = [str(reply["message"]["content"] if "message" in reply else reply["text"]) for reply in replies]
        except Exception as error:  # a model that cannot be loaded raises anything
            raise ServedModelError(
                f"the published model cannot be used: {type(error).__name__}: {error}", place=place, fix=_FIX
            ) from error
    for answer, text in zip(spec.answers, given, strict=True):
        if text != answer.text:
            raise ServedModelError(
                f"to {answer.messages[-1]['content'][:_SHOWN_CHARS]!r} the published model answers {text[:_SHOWN_CHARS]!r}, "
                f"the merged model {answer.text[:_SHOWN_CHARS]!r}",
                place=place,
                fix=_FIX,
            )


@contextmanager
def _artifact(store: Store, model_id: str) -> Iterator[Path]:
    """The files of the logged model: where the store keeps them if that is this disk, otherwise downloaded for the block."""
    kept = Path(store.call(lambda client: client.get_logged_model(model_id)).artifact_location.removeprefix("file://"))
    if kept.is_dir():
        yield kept
        return
    with TemporaryDirectory() as folder:
        found = store.call_globally(lambda _: mlflow.artifacts.download_artifacts(f"models:/{model_id}", dst_path=folder))
        yield Path(found)


class _Refuse:
    @staticmethod
    def find_spec(name: str, path: Sequence[str] | None = None, target: ModuleType | None = None) -> ModuleSpec | None:  # noqa: ARG004 - importlib's signature
        """Refuse our packages, leave all others to the next finder."""
        if name.partition(".")[0] in OUR_PACKAGES:
            raise ModuleNotFoundError(f"No module named {name!r} where the model will be used", name=name)
        return None


@contextmanager
def _without_our_packages() -> Iterator[None]:
    ours = {name: module for name, module in sys.modules.items() if name.partition(".")[0] in OUR_PACKAGES}
    for name in ours:
        del sys.modules[name]
    sys.meta_path.insert(0, _Refuse)
    try:
        yield
    finally:
        sys.meta_path.remove(_Refuse)
        sys.modules.update(ours)


def main(directory: Path) -> None:
    """Prove the logged model that the folder's spec names."""
    # `grpo validate` imports this file by way of the step, and needs no torch.
    from grpo_tasks.policy.load import pick_device

    spec = ServedSpec.load(directory / SPEC)
    pick_device(ResourcesConfig(device="cpu", num_threads=spec.num_threads))
    prove_served(spec)


if __name__ == "__main__":
    run_child(main)
