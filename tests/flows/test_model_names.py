"""Whatever names a model is accepted wherever a model is: registered names, folders, hub ids."""

import shutil

import pytest
import yaml

from schemas.paths import resolve
from tests.flows.place import SMALL, Place

pytestmark = [pytest.mark.long, pytest.mark.xdist_group("names"), pytest.mark.timeout(1800)]

COMMIT = "a" * 40
MODELS = ("small", "small@champion", "small/1", "models:/small/1", "folder", "somebody/base", "embedded:base")
ADAPTERS = ("adapter", "small", "small@champion", "small/1", "somebody/adapter")
ONE_UPDATE = ["--set", "stages.0.max_steps=1"]
COMMANDS = {
    "chat": (lambda name, _: ["chat", name, "What is 15 + 27?", "--greedy", "--max-new-tokens", "8"], ""),
    "download": (lambda name, number: ["download", name, f"copy-{number}"], "copy-"),
    "evaluate": (lambda name, _: ["evaluate", name, "small.yaml"], "2 held-out prompts"),
    "train": (lambda name, _: ["train", "small.yaml", "--from", name, *ONE_UPDATE], "stage format: 1 updates"),
    "model.path": (
        lambda name, _: ["train", "small.yaml", "--set", f"model.path={name}", *ONE_UPDATE],
        "stage format: 1 updates",
    ),
}
"""By command: its arguments for a name, and what it prints."""
CONFIG = SMALL | {"evaluation": SMALL["evaluation"] | {"max_prompts": 2, "num_samples": 1}}


def hub_model(cache, name, folder):
    """A folder as huggingface_hub keeps a downloaded model."""
    repository = cache / f"models--somebody--{name}"
    shutil.copytree(folder, repository / "snapshots" / COMMIT)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(COMMIT)


@pytest.fixture(scope="module")
def place(tmp_path_factory, prefect_api):
    """A folder with a registered champion, a model folder, an adapter, and two models in the hub's cache."""
    place = Place(tmp_path_factory.mktemp("names"), prefect_api)
    place.write("small.yaml", yaml.safe_dump(CONFIG))
    place.grpo("run", "small.yaml")
    place.client.set_registered_model_alias("small", "champion", "1")
    [adapter] = place.root.glob("runs/small/train_stage/format-*/final")
    shutil.copytree(adapter, place.root / "adapter")
    shutil.copytree(resolve("embedded:base"), place.root / "folder")
    hub_model(place.root / "hub", "base", place.root / "folder")
    hub_model(place.root / "hub", "adapter", place.root / "adapter")
    return place


@pytest.fixture(scope="module")
def done(place):
    """Exit code and output of every command with every name."""
    calls = {
        f"{command} {name}": make(name, number) for command, (make, _) in COMMANDS.items() for number, name in enumerate(MODELS)
    }
    calls |= {f"merge {name}": ["merge", name, "small.yaml", "--into", f"merged-{n}"] for n, name in enumerate(ADAPTERS)}
    calls["merge folder"] = ["merge", "folder", "small.yaml"]
    calls["download nobody/nothing"] = ["download", "nobody/nothing", "nothing"]
    calls["download small/9"] = ["download", "small/9", "nothing"]
    return place.grpo_in_one(calls, HF_HUB_CACHE=str(place.root / "hub"), HF_HUB_OFFLINE="1")


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize("name", MODELS)
def test_every_command_takes_every_name_of_a_model(done, command, name):
    code, output = done[f"{command} {name}"]
    assert code == 0, output
    assert COMMANDS[command][1] in output


@pytest.mark.parametrize("name", MODELS)
def test_a_download_is_a_model_folder_of_files(done, place, name):
    folder = place.root / f"copy-{MODELS.index(name)}"
    assert (folder / "config.json").is_file()
    assert not any(path.is_symlink() for path in folder.rglob("*"))


@pytest.mark.parametrize("name", ADAPTERS)
def test_an_adapter_is_named_by_folder_hub_id_or_version(done, place, name):
    code, output = done[f"merge {name}"]
    assert code == 0, output
    merged = [place.root / f"merged-{number}" / "model.safetensors" for number in (0, ADAPTERS.index(name))]
    assert merged[0].read_bytes() == merged[1].read_bytes()


@pytest.mark.parametrize(
    ("call", "says"),
    [
        ("merge folder", "no adapter there"),
        ("download nobody/nothing", "the hub did not give nobody/nothing"),
        ("download small/9", "versions of small: 1"),
    ],
)
def test_what_is_no_model_is_refused_with_what_to_name_instead(done, call, says):
    code, output = done[call]
    assert code != 0
    assert says in " ".join(output.replace("│", " ").split())
    assert output.count("fix:") == 1
