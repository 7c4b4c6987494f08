"""Real things shared by the session: the embedded model, its tokenizer, and the real data sets where they exist."""

import os
import sys
from pathlib import Path

import pytest
from hypothesis import settings
from jaxtyping import install_import_hook

# With SHAPES=1 (`make shapes`) every annotation of the code that works with tensors is checked, shapes and dtypes too. It costs
# half a minute of start and a third of a stage's time. An int is a float, as PEP 484 says.
if os.environ.get("SHAPES"):
    install_import_hook(
        ["grpo_tasks.attention", "grpo_tasks.grpo", "grpo_tasks.policy", "grpo_tasks.rollout"],
        "beartype.beartype(conf=beartype.BeartypeConf(is_pep484_tower=True))",
    )

# A slow machine is no fault of the code.
settings.register_profile("patient", deadline=None)
settings.load_profile("patient")

os.environ.setdefault("DO_NOT_TRACK", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
os.environ.setdefault("PREFECT_SERVER_ANALYTICS_ENABLED", "false")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
# Two test processes share the cores; torch's threads would wait for each other.
os.environ.setdefault("OMP_NUM_THREADS", "1")

REPOSITORY = Path(__file__).resolve().parent.parent
REAL_DATA = REPOSITORY.parent / "shared" / "data"


@pytest.fixture(scope="session")
def real_data() -> Path:
    """Folder of the real data sets; tests that want it skip where it is absent."""
    if not REAL_DATA.is_dir():
        pytest.skip("the real data sets (../shared/data) are not on this machine")
    return REAL_DATA


@pytest.fixture(scope="session")
def real_model() -> Path:
    """Folder of SmolLM2-135M-Instruct: GRPO_REAL_MODEL, or made once, for tests marked `real`."""
    from tests.real_model import real_model_folder

    try:
        return real_model_folder(os.environ.get("GRPO_REAL_MODEL"))
    except FileNotFoundError as absent:
        pytest.skip(f"{absent}; GRPO_REAL_MODEL names a folder")


@pytest.fixture(scope="session")
def base_ref():
    from schemas.results.model import ModelRef

    return ModelRef(path="embedded:base")


@pytest.fixture(scope="session")
def tokenizer(base_ref):
    from grpo_tasks.policy.load import load_tokenizer

    return load_tokenizer(base_ref)


@pytest.fixture
def policy(base_ref):
    """The embedded model with an adapter that is not zero, so that adapter on and off differ."""
    import torch

    from grpo_tasks.policy.load import trainable_policy
    from schemas.config.model import ModelConfig

    model = trainable_policy(base_ref, ModelConfig(), device=torch.device("cpu"), seed=1)
    torch.manual_seed(2)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.02)
    return model


@pytest.fixture(scope="session")
def prompts(tokenizer):
    """Token ids of four prompts of different lengths."""
    from grpo_tasks.content.tokenizer import prompt_ids

    questions = ["What is 15 + 27?", "What is 99 - 13?", "Hi", "What is 12 + 77? Answer in one word, please."]
    return [prompt_ids(tokenizer, [{"role": "user", "content": question}]) for question in questions]


@pytest.fixture(scope="session")
def prefect_api(tmp_path_factory):
    """Address of a Prefect server that all tests share, because starting one takes ten seconds."""
    from tests.flows.place import prefect_server

    with prefect_server(tmp_path_factory.mktemp("prefect")) as api:
        yield api


@pytest.fixture(autouse=True)
def unchanged_default_dtype():
    """Names the test that leaves torch's default dtype changed, which would fail other tests after it."""
    yield
    torch = sys.modules.get("torch")
    if torch and (left := torch.get_default_dtype()) is not torch.float32:
        torch.set_default_dtype(torch.float32)
        pytest.fail(f"this test, or a thread that still runs, left torch's default dtype at {left}")


def pytest_configure(config):
    # A process of `-n 2` runs tests of every room, so it needs them anyway; a single file may not.
    if hasattr(config, "workerinput"):
        from grpo_tasks.processes.fork_server import import_libraries

        import_libraries()


def pytest_addoption(parser):
    parser.addoption("--golden", action="store_true", help="write the golden curve anew")
