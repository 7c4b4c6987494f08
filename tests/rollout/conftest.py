"""A model with tokens of its own, for every engine."""

import os

import pytest
import torch

from grpo_tasks.policy.load import load_base, load_tokenizer
from schemas.config.model import ModelConfig
from schemas.results.model import ModelRef
from tests.rollout.servers import SMALL
from tests.rollout.stops import ORDINARY, SPECIAL


@pytest.fixture(scope="session")
def widened(tmp_path_factory):
    """The embedded model with a special and an ordinary token of its own, as somebody makes it who adds them."""
    folder = tmp_path_factory.mktemp("widened")
    model = load_base(ModelRef(path="embedded:base"), ModelConfig(), device=torch.device("cpu"))
    tokenizer = load_tokenizer(ModelRef(path="embedded:base"))
    tokenizer.add_special_tokens({"additional_special_tokens": [SPECIAL]})
    tokenizer.add_tokens([ORDINARY])
    embedded = model.resize_token_embeddings(len(tokenizer), mean_resizing=False).weight
    with torch.no_grad():
        # As likely as a digit, so that they come up.
        for added, digit in ((SPECIAL, "7"), (ORDINARY, "2")):
            embedded[tokenizer.convert_tokens_to_ids(added)] = embedded[tokenizer.convert_tokens_to_ids(digit)]
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return ModelRef(path=str(folder))


@pytest.fixture(scope="module")
def key():
    """All servers ask for a key, those started by us too."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_API_KEY", "planted-key-of-the-tests")
        yield


@pytest.fixture(scope="module")
def small():
    """Servers that are started with this interpreter are the small ones of `served/`."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", os.pathsep.join(filter(None, [str(SMALL), os.environ.get("PYTHONPATH")])))
        yield
