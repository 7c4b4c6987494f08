"""A fault in a model, its tokenizer or its template is named before the first update; see planted_models.py."""

import pytest

from tests.flows.place import Place
from tests.flows.planted_models import FAULTS, run_with

pytestmark = [pytest.mark.long, pytest.mark.xdist_group("planted"), pytest.mark.timeout(1800)]


def test_every_planted_fault_is_found_before_the_first_update(tmp_path_factory, prefect_api):
    place = Place(tmp_path_factory.mktemp("planted"), prefect_api)
    outcomes = [run_with(place, fault, number) for number, fault in enumerate(FAULTS)]
    assert [outcome.fault.name for outcome in outcomes if not outcome.found] == []
