"""A flipped byte in any file of a finished run is reported with the file, and never leads to a wrong result; see planted.py."""

import pytest

from tests.flows.place import Place
from tests.flows.planted import DOWNLOAD, EVALUATE, KINDS, RUN, finished_run, plant

pytestmark = [pytest.mark.long, pytest.mark.xdist_group("planted"), pytest.mark.timeout(1800)]


def rounds():
    """Kinds that one run meets together: of each step's files one a round, so that no damage hides another."""
    waiting = [kind for kind in KINDS if kind.command == RUN]
    while waiting:
        steps, now = set(), []
        for kind in waiting:
            step = kind.pattern.split("/")[2]
            if step not in steps:
                steps.add(step)
                now.append(kind)
        waiting = [kind for kind in waiting if kind not in now]
        yield tuple(now)
    yield from ((kind,) for kind in KINDS if kind.command in (EVALUATE, DOWNLOAD))


def test_a_flipped_byte_is_repaired_or_refused_with_its_file(tmp_path_factory, prefect_api):
    place = Place(tmp_path_factory.mktemp("planted"), prefect_api)
    finished_run(place)
    outcomes = [outcome for number, kinds in enumerate(rounds()) for outcome in plant(place, kinds, number)]
    assert len(outcomes) == len(KINDS)
    assert {outcome.kind.name: outcome.wrong for outcome in outcomes if outcome.wrong} == {}


def test_another_adapter_in_the_same_folder_is_evaluated_again(tmp_path_factory, prefect_api):
    import re
    import shutil

    place = Place(tmp_path_factory.mktemp("evaluated"), prefect_api)
    finished_run(place)
    [first] = place.root.glob("runs/small/train_stage/*/final")
    adapter = place.root / "ad"
    shutil.copytree(first, adapter)
    shown = place.grpo("evaluate", "ad", "small.yaml")
    assert "unchanged, skipped" in place.grpo("evaluate", "ad", "small.yaml")
    place.grpo(*RUN, "--set", "stages.0.learning_rate=0.05", "--set", "name=other")
    [second] = place.root.glob("runs/other/train_stage/*/final")
    shutil.copytree(second, adapter, dirs_exist_ok=True)
    again = place.grpo("evaluate", "ad", "small.yaml")
    assert re.search(r"evaluate_model-model: done in", again)
    assert again.split("held-out prompts")[0][-600:] != shown.split("held-out prompts")[0][-600:]
