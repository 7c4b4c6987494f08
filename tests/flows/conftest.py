"""The command line in temporary folders, each with its own Prefect home and MLflow store."""

import pytest
import yaml

from tests.flows.place import SMALL, Place


@pytest.fixture
def place(tmp_path, prefect_api):
    return Place(tmp_path, prefect_api)


@pytest.fixture
def lone_place(tmp_path):
    """Without any server."""
    return Place(tmp_path)


@pytest.fixture
def small(place):
    """Write the small config with changed top-level sections."""

    def write(**changes):
        return place.write("small.yaml", yaml.safe_dump(SMALL | changes))

    return write


@pytest.fixture(scope="session")
def demo(tmp_path_factory):
    """`grpo run demo`, run once a session; returns the folder and the output."""
    place = Place(tmp_path_factory.mktemp("demo"))
    return place, place.grpo("run", "demo")
