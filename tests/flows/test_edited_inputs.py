"""Inputs that change while a run is going on: what is recorded is what ran; see edited_inputs.py."""

import pytest

from tests.flows.edited_inputs import outcomes_in

pytestmark = [pytest.mark.long, pytest.mark.xdist_group("edited"), pytest.mark.timeout(3600)]


def test_editing_any_input_changes_nothing_recorded_or_stops_the_run(tmp_path_factory, prefect_api):
    outcomes = list(outcomes_in(tmp_path_factory.mktemp("edited"), prefect_api))
    assert len(outcomes) > 20
    assert {(outcome.inputs, outcome.step): outcome.faults for outcome in outcomes if outcome.faults} == {}
