"""What is taken out of texts that are shown or recorded."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from schemas.errors import TrackingError
from schemas.load import load_config
from schemas.secret import has_password, hide


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("postgresql://me:pa55@host/db", "postgresql://me:***@host/db"),
        ("see http://:pa55@host and http://me:x@other", "see http://:***@host and http://me:***@other"),
        ("http://127.0.0.1:5000/api", "http://127.0.0.1:5000/api"),
        ("mail me@host: http://host", "mail me@host: http://host"),
    ],
)
def test_passwords_in_addresses_are_hidden(text, shown):
    assert hide(text) == shown
    assert has_password(text) == (text != shown)


@pytest.mark.parametrize("name", ["HF_TOKEN", "AWS_SECRET_ACCESS_KEY", "OPENAI_API_KEY", "PREFECT_SERVER_API_AUTH_STRING"])
def test_values_of_secret_variables_are_hidden(monkeypatch, name):
    monkeypatch.setenv(name, "someone:planted-value")
    assert hide("it said planted-value.") == "it said ***."
    assert hide("someone:planted-value") == "***"


def test_short_and_other_values_are_left_alone(monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "abc")
    monkeypatch.setenv("HOME_TOWN", "planted-value")
    assert hide("abc planted-value") == "abc planted-value"


@given(st.text(alphabet="ab:/@. ", max_size=60))
def test_hiding_twice_changes_nothing_more(text):
    assert hide(hide(text)) == hide(text)


def test_errors_hold_no_secret(monkeypatch):
    monkeypatch.setenv("MLFLOW_TRACKING_PASSWORD", "planted-value")
    error = TrackingError("planted-value was refused", place="http://me:pw@host", mend="not planted-value")
    assert "planted-value" not in error.to_json() + str(error)
    assert "http://me:***@host" in str(error)


@pytest.mark.parametrize(
    ("override", "mend"),
    [
        ("tracking.tracking_uri=http://me:planted@host:5000", "MLFLOW_TRACKING_URI"),
        ("rollout.vllm.base_urls=[http://me:planted@host:8000]", "VLLM_API_KEY"),
        ("rollout.vllm.extra_args=[--api-key=planted]", "VLLM_API_KEY"),
        ("rollout.vllm.extra_args=[--host, 0.0.0.0]", "listens on 127.0.0.1 alone"),
    ],
)
def test_a_config_with_a_password_is_refused_without_repeating_it(override, mend):
    with pytest.raises(Exception, match=mend) as refused:
        load_config("demo", [override])
    assert "planted" not in str(refused.value)
