"""What is taken out of texts that are shown or recorded."""

import html
import json
import os
import re
import subprocess
import sys
import traceback
from pathlib import Path
from urllib.parse import quote, quote_plus

import pytest
from hypothesis import given
from hypothesis import strategies as st

from schemas.config.load import load_config
from schemas.errors import ConfigError, TrackingError, hidden_errors
from schemas.secret import has_password, hide, hide_written, is_secret_name, secrets_in

SECRET_NAMES = """
DB_PWD MYSQL_PASS MYSQL_PWD HF_KEY SSH_PRIVATE_KEY PGPASSWORD AWS_ACCESS_KEY_ID dbPassword apiKey api-key access_token
OPENAI_API_KEY_2 CLIENT_SECRET GOOGLE_CREDENTIALS PREFECT_AUTH REDIS_AUTH GITHUB_PAT KEY_PASSPHRASE X-Amz-Signature
LDAP_BIND_PW GITHUB_BEARER SESSION_COOKIE SLACK_WEBHOOK SLACK_WEBHOOK_URL HF_TOKEN AWS_SECRET_ACCESS_KEY OPENAI_API_KEY
DB_PWD_2 MYAPIKEY API_JWT AZURE_SIG SLACK_WEBHOOK_URI SIGNING_KEY_ID ENCRYPTION_KEY_HEX MASTER_KEY_ID AUTH_KEY_ID
"""
OTHER_NAMES = """
MONKEY TOKENIZERS_PARALLELISM PATH PWD OLDPWD COMPASS SSH_AUTH_SOCK GIT_ASKPASS MAX_TOKENS KEYBOARD BYPASS PASSENGERS PUBLIC_KEY
HF_TOKEN_PATH AUTHOR SECRETARY TURKEY_TEMPERATURE GRPO_WORKDIR COOKIE_FILE COOKIECUTTER_NAME WEBHOOK_LIMIT_S PWM
OLD_PWD TOKEN_TTL TOKEN_EXPIRY SECRETS_DIR SECRETS_FOLDER TOKEN_SOCKET
"""
KEY = """-----BEGIN OPENSSH PRIVATE KEY-----
b3BlbnNzaC1rZXktdjEAAAAABG5vbmUAAAAEbm9u
QyNTUxOQAAACDf7planted7lineAAAAtzc2gtZWQ
-----END OPENSSH PRIVATE KEY-----
"""


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("postgresql://me:pa55@host/db", "postgresql://me:***@host/db"),
        ("see http://:pa55@host and http://me:x@other", "see http://:***@host and http://me:***@other"),
        ("http://127.0.0.1:5000/api", "http://127.0.0.1:5000/api"),
        ("mail me@host: http://host", "mail me@host: http://host"),
        ("postgresql://me:a/b@c:d@host:5432/db", "postgresql://me:***@host:5432/db"),
        ("http://me@corp.example:a/b@host", "http://me@corp.example:***@host"),
        ("redis://:pa55#?@host", "redis://:***@host"),
        ("https://hf_abc@host/x.jsonl", "https://***@host/x.jsonl"),
        ("git+https://x-oauth-token-of-someone:@host", "git+https://***@host"),
        ("GET /x?page=2&api_key=abc&sort=up", "GET /x?page=2&api_key=***&sort=up"),
        ("http://host/x?password=a%20b", "http://host/x?password=***"),
        ("http://host?a=1&token=abc&b=2", "http://host?a=1&token=***&b=2"),
        ("postgresql://me@host/db", "postgresql://me@host/db"),
        ("redis://a-token-of-twenty-letters:x@host", "redis://***@host"),
        ("git+ssh://git@host/repo", "git+ssh://git@host/repo"),
        ("git+ssh://git@host:group/repo", "git+ssh://git@host:group/repo"),
        ("models:/grpo-demo@champion", "models:/grpo-demo@champion"),
        ("https://host/a/@b?c=d", "https://host/a/@b?c=d"),
    ],
)
def test_passwords_in_addresses_are_hidden(text, shown):
    assert hide(text) == shown
    assert has_password(text) == (text != shown)


# Written in two parts, so that no scanner takes this file for a leak.
HF, AWS = "hf" + "_QwErTyUiOpAsDfGhJkLzXcVbNm12345678", "AKIA" + "IOSFODNN7EXAMPLE"
GITHUB = "ghp" + "_16C7e42F292c6912E7710c838347Ae178B4a"
JWT = "eyJhbGciOiJIUzI1NiJ9" + ".eyJzdWIiOiIxMjM0NTY3ODkwIn0.dozjgNryP4J3jVmNHl0w5N_XgL0n3I9PlFUP0THsR8U"
SLACK = "https://hooks.slack.com/services" + "/T00000000/B00000000/XXXXXXXXXXXXXXXXXXXXXXXX"


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        *((f"it said {token}, and\n{token}", "it said ***, and\n***") for token in (HF, AWS, GITHUB, JWT)),
        (repr(f"a\n{HF}\t{AWS}"), repr("a\n***\t***")),
        (f"POST {SLACK} failed", "POST https://hooks.slack.com/services/*** failed"),
        ("https://discord.com/api/webhooks/123456/aBc-dEf_1", "https://discord.com/api/webhooks/***"),
        ("https://acme.webhook.office.com/webhookb2/aa@bb/IncomingWebhook/cc", "https://acme.webhook.office.com/webhookb2/***"),
        ("https://api.telegram.org/bot123:AAE-x/sendMessage", "https://api.telegram.org/bot***"),
        ("curl -H 'Authorization: Bearer abc'", "curl -H 'Authorization: Bearer ***'"),
        ("Authorization: Basic bWU6cGE1NQ==", "Authorization: Basic ***"),
        ("refused: Bearer a1b2c3d4e5f6", "refused: Bearer ***"),
        ("{'Cookie': 'session=abc; csrf=d e'}", "{'Cookie': '***'}"),
        ("Set-Cookie: id=abc; HttpOnly\nDate: today", "Set-Cookie: ***\nDate: today"),
        ("X-Auth-Token: abc-def", "X-Auth-Token: ***"),
        ('{"X-Auth-Token": "abc-def"}', '{"X-Auth-Token": "***"}'),
        ("host=db user=me password=pa55 dbname=x", "host=db user=me password=*** dbname=x"),
        ("host=db password='pa 55\\' x' user=me", "host=db password=*** user=me"),
        ("Server=db;Uid=me;Pwd=pa55;", "Server=db;Uid=me;Pwd=***;"),
        ("Server=db Pwd=pa55", "Server=db Pwd=***"),
        ("LDAP_BIND_PW=pa55word\nHOME=/root", "LDAP_BIND_PW=***\nHOME=/root"),
        ('DB_PASSWORD = "hunter2"  # ours', 'DB_PASSWORD = "***"  # ours'),
        ('{"password": "hunter2", "port": "80"}', '{"password": "***", "port": "80"}'),
        (json.dumps('{"api_key": "hunter2"}'), json.dumps('{"api_key": "***"}')),
    ],
)
def test_whatever_looks_like_a_secret_is_hidden_everywhere(text, shown):
    assert hide(text) == shown
    assert hide_written(text) == shown
    assert hide(shown) == shown


STARTS = "hf_ ghp_ gho_ ghu_ ghs_ ghr_ npm_ pnu_ pnb_ gsk_ api_org_ github_pat_ dckr_pat_ glpat- nvapi- xoxb- sk- sk-proj- pypi-"
OTHERS = ["ASIA" + "A7" * 8, "AIza" + "Sy5" * 11 + "ab", "dapi" + "a7" * 16]
HOOKS = """
hooks.slack.com/workflows/ hooks.slack.com/triggers/ discordapp.com/api/v10/webhooks/ outlook.office.com/webhook/
hooks.zapier.com/hooks/catch/ maker.ifttt.com/trigger/ open.feishu.cn/open-apis/bot/v2/hook/
open.larksuite.com/open-apis/bot/v2/hook/
"""


def test_keys_and_webhooks_of_every_known_service_are_hidden():
    for key in [*(start + "a7Bc9" * 11 for start in STARTS.split()), *OTHERS]:
        assert hide(f"it said {key}, and") == "it said ***, and"
    for hook in HOOKS.split():
        assert hide(f"POST https://{hook}a7Bc9 failed") == f"POST https://{hook}*** failed"


@pytest.mark.parametrize(
    "text",
    [
        'TOKEN_ACCURACY = "token_accuracy"',
        '{"key": "0123456789abcdef0123456789abcdef", "sha256": "ab12"}',
        '{"pad_token": "<|endoftext|>", "sort_key": "answer", "tokens": "12"}',
        "def connect(host, password=None, cookie=None): the bearer of good news has a cookie: chocolate",
        "export PREFECT_API_AUTH_STRING=USER:PASSWORD; --set KEY=VALUE; PWD=/root/work",
        "https://hooks.slack.com/docs and https://discord.com/channels/1/2",
        "task-specific-learning-rates sk-learn half_precision_training_of_hf_models",
        "prompt_id 8f14e45fceea167a5a36dedd4bea2543 <answer>AKIA</answer>",
    ],
)
def test_what_only_resembles_a_secret_is_left_alone(monkeypatch, text):
    for name in [name for name in os.environ if is_secret_name(name) or "://" in os.environ[name]]:
        monkeypatch.delenv(name)
    assert hide(text) == text


def test_a_word_of_the_environment_stays_in_what_a_program_reads_again(monkeypatch):
    monkeypatch.setenv("MY_TOKEN", "format")
    assert hide("stage format") == "stage ***"
    assert hide_written("stage format") == "stage format"


def test_values_of_secret_variables_are_hidden_and_short_or_other_ones_not(monkeypatch):
    monkeypatch.setenv("PREFECT_SERVER_API_AUTH_STRING", "someone:planted-value")
    assert hide("it said planted-value.") == "it said ***."
    assert hide("someone:planted-value") == "***"
    monkeypatch.setenv("HF_TOKEN", "abc")
    monkeypatch.setenv("HOME_TOWN", "other-value")
    assert hide("abc other-value") == "abc other-value"
    monkeypatch.setenv("HF_TOKEN", "planted-word\n")
    assert hide("it said planted-word.") == "it said ***."


def test_names_of_secrets_are_known_and_names_of_other_things_are_not():
    assert [name for name in SECRET_NAMES.split() if not is_secret_name(name)] == []
    assert [name for name in OTHER_NAMES.split() if is_secret_name(name)] == []


def test_each_line_of_a_secret_is_hidden_and_its_frame_is_not(monkeypatch):
    monkeypatch.setenv("SSH_PRIVATE_KEY", KEY)
    for line in KEY.splitlines()[1:3]:
        assert line not in hide(f"the key is broken at {line}, it says")
        assert line not in hide(repr({"key": KEY})) + hide(json.dumps(KEY)) + hide(KEY)
    assert hide("-----BEGIN CERTIFICATE-----") == "-----BEGIN CERTIFICATE-----"
    monkeypatch.delenv("SSH_PRIVATE_KEY")
    assert hide(f"it holds {KEY}, which") == "it holds ***\n, which"
    assert hide(f"it holds {KEY[:80]}") == "it holds ***", "the end is cut off"


def test_a_password_in_an_address_of_the_environment_is_hidden(monkeypatch):
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://me:12345/6@7@host:5000")
    assert hide("the password 12345/6@7 was refused by host") == "the password *** was refused by host"
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://me:pa%2055%21word@host?token=planted-word")
    assert hide("pa%2055%21word is pa 55!word, next to planted-word") == "*** is ***, next to ***"


@given(st.text(alphabet=st.characters(codec="utf-8", exclude_categories=["Cs"]), min_size=12, max_size=30))
def test_a_secret_is_hidden_however_it_is_written(value):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HF_KEY", value.replace("\0", "0"))
        value = os.environ["HF_KEY"]
        plain = json.dumps(value, ensure_ascii=False)
        in_address = quote(value), quote(value, ""), quote_plus(value)
        for text in (value, repr(value), json.dumps(value), plain, html.escape(value), *in_address):
            assert value not in hide(f"it said {text} and went")
            assert text not in hide(f"it said {text} and went")


PASSWORD = st.text(
    alphabet=st.characters(codec="ascii", min_codepoint=33, exclude_characters="\"'<>`\\"), min_size=1, max_size=20
)


@given(PASSWORD, st.sampled_from(["postgresql", "http", "redis", "https"]), st.sampled_from(["me", "", "someone-else"]))
def test_any_password_in_an_address_is_hidden_and_refused(password, scheme, user):
    address = f"{scheme}://{user}:{password}@host:5432/db"
    assert has_password(address)
    # A number before a slash is a port.
    if not re.match(r"[0-9]*[/?#]", password):
        assert hide(f"at {address}, it said") == f"at {scheme}://{user}:***@host:5432/db, it said"


@given(st.text(max_size=200))
def test_text_without_an_address_and_without_a_parameter_is_left_alone(text):
    plain = re.sub(r"[?&;]|://|-----BEGIN", " ", text)
    with pytest.MonkeyPatch.context() as patch:
        for name in [name for name in os.environ if is_secret_name(name) or "://" in os.environ[name]]:
            patch.delenv(name)
        patch.setenv("TOKENIZERS_PARALLELISM", plain.replace("\0", "")[:20])
        assert hide(plain) == plain


WORD = st.text(alphabet="abcxyz019-_", min_size=1, max_size=8)


@given(WORD, st.integers(1, 65535), st.lists(WORD, max_size=3), WORD, WORD)
def test_an_address_without_a_user_is_left_alone(host, port, path, version, sort):
    address = f"http://{host}:{port}/{'/'.join(path)}@{version}?sort={sort}&page=2#top"
    assert hide(address) == address


UNITS = ("://", "a:@/", "?a", "x://a:", "-----BEGIN ", "-----BEGIN PRIVATE KEY-----", "authorization: ", "A", "?a.-_=")
UNITS += ("A_=", "a='", "password=", "cookie: a", "bearer a", "sk-", "eyJ")


@pytest.mark.slow
@pytest.mark.parametrize("unit", UNITS)
def test_hiding_reads_a_long_text_once(unit):
    # A pattern that goes back and forth would take hours here.
    assert hide(unit * (2_000_000 // len(unit)))


@given(st.text(alphabet="ab:/@. ", max_size=60))
def test_hiding_twice_changes_nothing_more(text):
    assert hide(hide(text)) == hide(text)


def test_what_a_process_prints_holds_no_secret():
    code = """
import os, sys
from schemas.secret import hide_output
hide_output(); hide_output()
print("said", os.environ["HF_KEY"], file=sys.stdout)
print("said", os.environ["HF_KEY"], file=sys.stderr)
raise ValueError("http://me:planted@host and " + os.environ["HF_KEY"])
"""
    environment = os.environ | {"HF_KEY": "hf planted key"}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False)
    assert done.stdout == "said ***\n"
    assert done.stderr.startswith("said ***\n")
    assert done.stderr.endswith("ValueError: http://me:***@host and ***\n")
    assert "planted" not in done.stdout + done.stderr


def fail(error):
    try:
        raise OSError("http://me:planted@host does not answer")
    except OSError as cause:
        raise error from cause


@pytest.mark.parametrize(
    ("raised", "kind", "says"),
    [
        (
            ConnectionError("cannot connect"),
            RuntimeError,
            r"OSError: http://me:\*\*\*@host(?s:.*)ConnectionError: cannot connect",
        ),
        (TrackingError("MLflow cannot be reached"), TrackingError, "MLflow cannot be reached"),
    ],
)
def test_an_error_is_let_out_without_the_secrets_that_led_to_it(raised, kind, says):
    with pytest.raises(kind, match=says) as caught, hidden_errors():
        fail(raised)
    assert "planted" not in "".join(traceback.format_exception(caught.value))
    with pytest.raises(ConnectionError, match="plain"), hidden_errors():
        raise ConnectionError("plain")


def test_errors_hold_no_secret(monkeypatch):
    monkeypatch.setenv("MLFLOW_TRACKING_PASSWORD", "planted-value")
    error = TrackingError("planted-value was refused", place="http://me:pw@host", fix="not planted-value")
    assert "planted-value" not in error.to_json() + str(error)
    assert "http://me:***@host" in str(error)


@pytest.mark.parametrize(
    ("override", "fix"),
    [
        ("tracking.tracking_uri=http://me:planted@host:5000", "MLFLOW_TRACKING_URI"),
        ("rollout.vllm.base_urls=[http://me:planted@host:8000]", "VLLM_API_KEY"),
        ("rollout.vllm.extra_args=[--api-key=planted]", "VLLM_API_KEY"),
        ("rollout.vllm.extra_args=[--host, 0.0.0.0]", "listens on 127.0.0.1 only"),
        ("rollout.vllm.extra_args=[--hf-token, hf_planted0123456789]", "rollout.vllm.extra_args.1"),
        ("rollout.vllm.extra_args=[--hf-token=hf_planted0123456789]", "rollout.vllm.extra_args.0"),
        ("tracking.tracking_uri=http://me:80/planted@host", "MLFLOW_TRACKING_URI"),
        ("tracking.tracking_uri=http://host:5000/?password=planted", "MLFLOW_TRACKING_URI"),
        ("data.train.0.path=https://planted@host/x.jsonl", "data.train.0.path"),
        ("model.path=https://me:pla/nted@host/x", "model.path"),
        ("rewards.functions.own={function: 'a:b', params: {api_key: planted}}", "rewards.functions.own.params.api_key"),
        ("rewards.functions.own={function: 'a:b', params: {dsn: 'host=db password=planted'}}", "functions.own.params.dsn"),
        ("data.train.0.path=https://host/x.jsonl?api_key=planted", "data.train.0.path"),
        (
            "rewards.functions.own={function: 'a:b', params: {db: {password: planted}}}",
            "rewards.functions.own.params.db.password",
        ),
        ("rewards.functions.own={function: 'a:b', params: {urls: ['x://me:planted@h']}}", "rewards.functions.own.params.urls.0"),
    ],
)
def test_a_config_with_a_password_is_refused_without_repeating_it(override, fix):
    with pytest.raises(Exception, match=fix) as refused:
        load_config("demo", [override])
    assert "planted" not in str(refused.value)


def test_a_config_that_holds_the_value_of_a_secret_variable_is_refused(monkeypatch):
    monkeypatch.setenv("HF_KEY", "hf planted key")
    with pytest.raises(ConfigError, match=r"data\.system_prompt contains a password, token or key"):
        load_config("demo", ["data.system_prompt=Say hf planted key now."])


def test_settings_with_harmless_names_are_no_secrets():
    params = {"answer_key": "answer", "pad_token": "<pad>", "stop_token": "</answer>", "max_tokens": 64, "password_field": None}
    args = ["--max-num-batched-tokens", "4096", "--tokenizer", "a/b", "--pass", "1"]
    at = ["models:/demo@champion", "hf://datasets/a/b@main", "embedded:arithmetic_train.jsonl"]
    assert list(secrets_in({"params": params, "args": args, "at": at})) == []
    assert list(secrets_in({"file": Path(HF), "pair": ("a", HF)})) == ["file", "pair.1"]
