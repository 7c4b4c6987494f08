"""A multimodal checkpoint whose text tower is trained: the names of its layers, and the rest of it after a merge.

transformers takes the text model out of some of these checkpoints (Qwen3.5), so that nothing of the vision tower is loaded:

    as published   model.language_model.layers.0...   model.visual...   mtp...   lm_head.weight
    as trained     model.layers.0...                                             lm_head.weight

peft on the published class, vLLM and SGLang know the published names only, and ignore an adapter with others, some without a word
(vllm issues 34186, 48019, 49354). So adapters have the published names in their files, and a merged model is the checkpoint that
was published, in which only the weights of the text model are others.
"""

import json
import re
import shutil
import warnings
from collections.abc import Collection
from pathlib import Path
from typing import Any, cast

import torch
import transformers
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, PreTrainedModel

from grpo_tasks.content.model_files import file_of
from schemas.errors import Notice
from schemas.paths import resolve
from schemas.results.model import MergedDtype

PEFT_START = "base_model.model."
STARTS = ("model.language_model.", "language_model.model.", "model.")
"""What stands before the names of the text layers: in transformers' multimodal models, in vLLM's and in older files of
transformers, in text models. The last one is the beginning of the first, so it is looked for last."""
TEXT = "model."
PUBLISHED = "_published_start"
"""Where a loaded text model keeps `published_start` of its checkpoint."""
LANGUAGE = "language_model"
"""Part of the names of all weights of the text tower, but for `HEAD`."""
HEAD = "lm_head.weight"
"""Some files have it although it is tied: the embeddings of the base."""
INDEX = "model.safetensors.index.json"
_PROCESSOR = ("preprocessor_config.json", "video_preprocessor_config.json", "processor_config.json")
"""What makes numbers of images; the tokenizer's files come from the training."""


def published_start(path: str, revision: str | None) -> str | None:
    """What stands before the names of the text layers in the class that a checkpoint names; None where that class is trained."""
    config = AutoConfig.from_pretrained(resolve(path), revision=revision)
    trained = AutoModelForCausalLM._model_mapping.get(type(config), None)
    published = getattr(transformers, next(iter(config.architectures or ()), ""), None)
    if trained is None or published is trained or config.get_text_config() is config:
        return None
    if not isinstance(published, type) or not issubclass(published, PreTrainedModel):
        return None
    with torch.device("meta"):
        whole = cast(Any, published)._from_config(config)
    tower = AutoModel._model_mapping[type(config.get_text_config())]
    places = [f"{name}." for name, module in whole.named_modules() if isinstance(module, tower)]
    return next((start for start in STARTS[:-1] if start in places), None)


def trained_names(start: str | None) -> dict[str, str] | None:
    """The renaming of an adapter's keys when it is loaded, as peft takes it. Names of the text model stay as they are."""
    return None if start is None else {f"^{re.escape(start)}": TEXT}


def publish_names(adapter: Path, start: str) -> None:
    """Give the layers of a saved adapter the names of the published class, in its weights and in its config."""
    rename_keys(adapter, start)
    file = adapter / "adapter_config.json"
    config = json.loads(file.read_text(encoding="utf-8"))
    # peft compares the ends of names here, and so they fit both classes without their beginning.
    if config.get("exclude_modules"):
        config["exclude_modules"] = [name.removeprefix(TEXT) for name in config["exclude_modules"]]
    if config.get("trainable_token_indices"):
        config["trainable_token_indices"] = {
            name.removeprefix(TEXT): rows for name, rows in config["trainable_token_indices"].items()
        }
    file.write_text(json.dumps(config, indent=2, sort_keys=True), encoding="utf-8")


def rename_keys(folder: Path, start: str | None) -> None:
    """Write the weights of a folder, an adapter or a model, with names that begin with `start`; None: leave them."""
    if start is None:
        return
    for file in sorted(folder.glob("*.safetensors")):
        renamed = {renamed_key(name, start): values for name, values in load_file(file).items()}
        save_file(renamed, file, metadata={"format": "pt"})
    for index in folder.glob("*.safetensors.index.json"):
        listed = json.loads(index.read_text(encoding="utf-8"))
        listed["weight_map"] = {renamed_key(name, start): file for name, file in listed["weight_map"].items()}
        index.write_text(json.dumps(listed), encoding="utf-8")


def renamed_key(name: str, start: str | None) -> str:
    """The name of a weight whose text layers begin with `start`; as it is where it belongs to no text layer."""
    head = PEFT_START if name.startswith(PEFT_START) else ""
    rest = name.removeprefix(head)
    found = next((known for known in STARTS if rest.startswith(known)), None)
    return name if start is None or found is None else head + start + rest.removeprefix(found)


def outside_text_tower(names: Collection[str]) -> set[str]:
    """Which weights of a multimodal class are not in its text tower; none of a text model, whose names have no `LANGUAGE`."""
    if not any(LANGUAGE in name for name in names):
        return set()
    return {name for name in names if LANGUAGE not in name and name != HEAD}


def complete(merged: Path, path: str, revision: str | None, dtype: MergedDtype) -> None:
    """Make a merged model in `merged` the multimodal checkpoint at `path` again: its class, and all other weights byte for byte.

    Nothing is to do for a text model. Where the files of `path` have other names than the merged
    weights (Llama 4), `merged` stays a text model, with a notice.
    """
    config = AutoConfig.from_pretrained(resolve(path), revision=revision)
    if config.get_text_config() is config:
        return
    given, ours = _files(path, revision), _files(str(merged), None)
    if published_start(path, revision) is None:
        # The class that was trained is the published one: that of Gemma 3 and 4, or a text model with a multimodal config.
        untrained = outside_text_tower(ours) & given.keys()
        if not untrained:
            return
    elif ours.keys() <= given.keys():
        untrained = given.keys() - ours.keys() - {HEAD}
        _publish_config(merged, path, revision, dtype)
    else:
        said = f"the merged model is the text model alone: its weights have other names than the files of {path}"
        warnings.warn(f"{said}. fix: to serve images too, serve the base with the adapter", Notice, stacklevel=2)
        return
    sources = {name: file for name, file in ours.items() if name not in untrained} | {name: given[name] for name in untrained}
    parts, listed, total = sorted(set(sources.values())), dict[str, str](), 0
    for number, part in enumerate(parts, start=1):
        name = f"model-{number:05d}-of-{len(parts):05d}.safetensors"
        with safe_open(part, "pt") as opened:
            chosen = {key: opened.get_tensor(key) for key, source in sources.items() if source == part}
        save_file(chosen, merged / f"{name}.new", metadata={"format": "pt"})
        listed |= dict.fromkeys(chosen, name)
        total += sum(tensor.nbytes for tensor in chosen.values())
    for file in set(ours.values()):
        file.unlink()
    for new in merged.glob("*.new"):
        shard = new.with_suffix("")
        new.rename(shard)
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(listed.items()))}
    (merged / INDEX).write_text(json.dumps(index, indent=2), encoding="utf-8")
    for name in _PROCESSOR:
        found = file_of(resolve(path), name, revision)
        if found is not None:
            shutil.copy(found, merged / name)


def _publish_config(merged: Path, path: str, revision: str | None, dtype: MergedDtype) -> None:
    text = json.loads((merged / "config.json").read_text(encoding="utf-8"))
    config = json.loads(_file(path, "config.json", revision).read_text(encoding="utf-8"))
    config.pop("torch_dtype", None)
    changed = {"dtype": dtype, "vocab_size": text["vocab_size"]}
    config |= {"dtype": dtype, "text_config": config["text_config"] | changed}
    (merged / "config.json").write_text(json.dumps(config, indent=2), encoding="utf-8")


def _files(path: str, revision: str | None) -> dict[str, Path]:
    """The file of each weight of a checkpoint, by its name."""
    index = file_of(resolve(path), INDEX, revision)
    if index is not None:
        listed: dict[str, Any] = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        return {name: _file(path, file, revision) for name, file in listed.items()}
    single = _file(path, "model.safetensors", revision)
    with safe_open(single, "pt") as opened:
        return dict.fromkeys(opened.keys(), single)


def _file(path: str, name: str, revision: str | None) -> Path:
    found = file_of(resolve(path), name, revision)
    if found is None:
        raise FileNotFoundError(f"{path}: {name}")
    return found
