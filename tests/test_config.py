"""Settings: every bad value is reported, nothing falls back silently, secrets stay hidden."""

from __future__ import annotations

import copy
import dataclasses
import json
import logging
import os
import pickle
import traceback
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuroute.config import Secret, Settings, is_secret, rows, unknown_variables, variable
from gpuroute.core.fleet import PoolConfig, PoolSpec
from gpuroute.errors import ConfigError
from gpuroute.forms import BOOLEAN, SECRET
from gpuroute.router import Router
from gpuroute.testing import FakeRegistry

if TYPE_CHECKING:
    from pathlib import Path

CANARY = "canary-5ec2e7"
BOOLEANS = [row for row in rows() if row.metadata["form"] is BOOLEAN]
NEEDED = {"GPUROUTE_FALLBACK_URL": "http://fallback"}


@pytest.fixture
def pem(tmp_path: Path) -> str:
    path = tmp_path / "some.pem"
    path.write_text("pem")
    return str(path)


@pytest.mark.parametrize("row", BOOLEANS, ids=lambda row: row.name)
@pytest.mark.parametrize(
    ("text", "value"),
    [
        *[(text, True) for text in ("true", "True", "TRUE", "1", "yes", "YES", "on", " true ")],
        *[(text, False) for text in ("false", "False", "FALSE", "0", "no", "No", "off", " false ")],
    ],
)
def test_c1_one_table_for_every_boolean(row: Any, text: str, value: bool) -> None:
    settings = Settings.from_env({variable(row.name): text, **NEEDED})
    assert getattr(settings, row.name) is value


@pytest.mark.parametrize("row", BOOLEANS, ids=lambda row: row.name)
@pytest.mark.parametrize("text", ["maybe", "2", "t", "y", "enabled", "none", "true,false"])
def test_c1_unknown_words_are_refused_by_name(row: Any, text: str) -> None:
    with pytest.raises(ConfigError, match=rf"{variable(row.name)}='{text}': expected true/false, 1/0"):
        Settings.from_env({variable(row.name): text, **NEEDED})


@pytest.mark.parametrize("row", BOOLEANS, ids=lambda row: row.name)
@pytest.mark.parametrize("environ", [lambda name: {}, lambda name: {name: ""}, lambda name: {name: "  "}])
def test_c1_unset_and_blank_are_the_default(row: Any, environ: Any) -> None:
    assert getattr(Settings.from_env(environ(variable(row.name))), row.name) is row.default


BAD = {
    "registry": ["etcd://user:pw@h:2379"],
    "registry_snapshot": ["two words"],
    "etcd_user": ["two words"],
    "etcd_ca": ["/no/such/file.pem"],
    "etcd_cert": ["/no/such/file.pem"],
    "etcd_key": ["/no/such/file.pem"],
    "policy": ["p3c", "p2c,random", "1"],
    "timeout": ["5x", "fast", "-1s", "0s", "inf", "nan", "2 s", "1s500ms", "1e999", "9000h"],
    "attempts": ["3x", "0", "-1", "2.5", "three", "3s", "\u00b2"],
    "connect_timeout": ["5x", "0", "-1"],
    "retry_budget": ["0.2", "20", "101%", "-1%", "a fifth"],
    "retry_floor": ["10", "10/m", "-1/s", "ten"],
    "max_in_flight": ["0", "8s", "many"],
    "zone": ["a b"],
    "region": ["a b"],
    "log_level": ["verbose", "10"],
    "fallback_url": ["fallback:8000", "ftp://x", "http://u:p@x", "http://", "http://:80", "http://x:y", "https://[::1"],
    "digest": ["digest:8000", "http://:80", "http://x:99999", "http://x:0", "http://a,https://[::1"],
    "rollout": ["10", "0.1", "ten%", "110%"],
    "ready_timeout": ["5x", "0", "1e12"],
    "empty_grace": ["5x", "-1s"],
    "tenant": ["a b"],
    "breaker_failures": ["0", "5s"],
    "breaker_open": ["0s", "soon"],
    "panic": ["fail", "open"],
    "asks": ["sometimes", "true"],
    "ask_timeout": ["0", "3x"],
    "agent_ca": ["/no/such/file.pem"],
    "agent_cert": ["/no/such/file.pem"],
    "agent_cert_key": ["/no/such/file.pem"],
}

CAN_BE_WRONG = [row.name for row in rows() if row.metadata["form"] not in (BOOLEAN, SECRET)]


@pytest.mark.parametrize(
    ("name", "text"), [(name, text) for name in CAN_BE_WRONG for text in BAD.get(name, ["two words"])]
)
def test_c2_bad_values_are_reported_with_name_value_and_form(name: str, text: str) -> None:
    form = {row.name: row.metadata["form"] for row in rows()}[name]
    with pytest.raises(ConfigError) as caught:
        Settings.from_env({variable(name): text})
    shown = "(value not shown)" if "@" in text else repr(text)
    assert f"{variable(name)}={shown}: expected {form.accepts}" in str(caught.value)
    with pytest.raises(ConfigError, match=rf"^{name}="):
        Settings.from_env({}, **{name: text})


@given(
    st.sampled_from([row.name for row in rows()]),
    st.one_of(
        st.text(),
        st.from_regex(r"-?[0-9]{1,4}(\.[0-9])?(e[0-9]{1,3})?(us|ms|s|m|h|%|/s)?", fullmatch=True),
        st.sampled_from([row.metadata["form"].show(row.default) for row in rows() if row.default is not None]),
    ),
)
def test_c2_any_text_is_taken_whole_or_refused(name: str, text: str) -> None:
    """Whatever the variable says, the result is a ConfigError or a value that says the same thing again."""
    try:
        settings = Settings.from_env({variable(name): text, **NEEDED})
    except ConfigError:
        return
    row = next(row for row in rows() if row.name == name)
    value, form = getattr(settings, name), row.metadata["form"]
    if value is None:
        assert row.default is None
        assert not text.strip()
    elif not isinstance(value, Secret):
        assert form.parse(form.show(value)) == (pytest.approx(value) if isinstance(value, float) else value)


@pytest.mark.parametrize("value", [object(), [1], 2.5, {}])
def test_c2_wrong_types_as_arguments(value: object) -> None:
    with pytest.raises(ConfigError, match="attempts="):
        Settings(attempts=value)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="disabled="):
        Settings.from_env({}, disabled=value)


@pytest.mark.parametrize(
    ("name", "value"),
    [("timeout", 10**400), ("rollout", 10**400), ("timeout", 1e11), ("zone", b"eu-1"), ("registry", b"")],
)
def test_numbers_that_nothing_can_hold_and_bytes_are_refused_like_any_bad_value(name: str, value: object) -> None:
    """Bytes as text would be taken for their repr, and a wait of centuries would be an OverflowError in each call."""
    with pytest.raises(ConfigError, match=rf"^{name}=.*expected "):
        Settings.from_env({}, **{name: value})


def test_c2_the_other_side_is_to_catch_the_error_and_go_on_with_defaults(monkeypatch: pytest.MonkeyPatch) -> None:
    """As docs/resilience.md says for those whom a typo must not stop: all defaults, but for what is given."""
    monkeypatch.setenv("GPUROUTE_REGISTRY", "llm=http://127.0.0.1:1")
    monkeypatch.setenv("GPUROUTE_TIMEOUT", "5 parsecs")
    monkeypatch.setenv("GPUROUTE_ATTEMPTS", "7")
    with pytest.raises(ConfigError, match="GPUROUTE_TIMEOUT='5 parsecs'"):
        Router()
    with Router(settings=Settings.from_env({}, registry="llm=http://127.0.0.1:1")) as router:
        router.ready()
        assert [view.id for view in router.snapshot().pools["llm"].endpoints] == ["127.0.0.1:1"]
        assert (router.settings.timeout, router.settings.attempts) == (None, 3)


def test_all_that_is_wrong_is_said_at_once() -> None:
    with pytest.raises(ConfigError) as caught:
        Settings.from_env({"GPUROUTE_ATTEMPTS": "x", "GPUROUTE_TIMEOUT": "y"}, zonee="z")
    for part in ("GPUROUTE_ATTEMPTS='x'", "GPUROUTE_TIMEOUT='y'", "'zonee' (did you mean zone?)"):
        assert part in str(caught.value)


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("250ms", 0.25), ("2s", 2.0), ("1m", 60.0), ("1h", 3600.0), ("1.5", 1.5), ("3", 3.0), (" 2S ", 2.0)],
)
def test_durations(text: str, seconds: float) -> None:
    assert Settings.from_env({"GPUROUTE_TIMEOUT": text}).timeout == seconds


def test_c2_misspelt_names_are_warned_about(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "gpuroute"):
        Settings.from_env({"GPUROUTE_POLCY": "p2c", "GPUROUTE_QQQQQQQQ": "1", "OTHER": "x"})
    # Threads of other tests may log as well.
    assert [text for text in caplog.messages if "unknown variable" in text] == [
        "unknown variable GPUROUTE_POLCY (did you mean GPUROUTE_POLICY?)",
        "unknown variable GPUROUTE_QQQQQQQQ",
    ]
    assert unknown_variables({"GPUROUTE_ETCD_PASSWORD_FILE": "x"}) == []


def test_c2_values_are_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GPUROUTE_ATTEMPTS", "5")
    settings = Settings.from_env()
    monkeypatch.setenv("GPUROUTE_ATTEMPTS", "7")
    assert settings.attempts == 5
    with pytest.raises(dataclasses.FrozenInstanceError):
        settings.attempts = 7  # type: ignore[misc]


@pytest.mark.parametrize(
    ("environ", "complaint"),
    [
        ({"ETCD_USER": "u"}, "GPUROUTE_ETCD_USER is set without GPUROUTE_ETCD_PASSWORD"),
        ({"ETCD_PASSWORD": CANARY}, "GPUROUTE_ETCD_PASSWORD is set without GPUROUTE_ETCD_USER"),
        ({"DISABLED": "1"}, "GPUROUTE_DISABLED is set without GPUROUTE_FALLBACK_URL"),
        ({"ROLLOUT": "10%"}, "GPUROUTE_ROLLOUT is below 100% without GPUROUTE_FALLBACK_URL"),
        ({"TIMEOUT": "1s", "CONNECT_TIMEOUT": "2s"}, "GPUROUTE_CONNECT_TIMEOUT is longer than GPUROUTE_TIMEOUT"),
        ({"ZONE_PRICE": "100ms"}, "GPUROUTE_ZONE_PRICE is set without GPUROUTE_ZONE"),
        ({"REGION_PRICE": "1s", "ZONE": "a"}, "GPUROUTE_REGION_PRICE is set without GPUROUTE_REGION"),
        ({"SUBSET": "auto", "REGISTRY": "llm=http://a:1"}, "GPUROUTE_SUBSET is set but GPUROUTE_REGISTRY is not etcd"),
    ],
)
def test_contradictions_are_errors(environ: dict[str, str], complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint):
        Settings.from_env({f"GPUROUTE_{name}": text for name, text in environ.items()})


def test_contradictions_between_certificates(pem: str) -> None:
    with pytest.raises(ConfigError, match="GPUROUTE_ETCD_CERT is set without GPUROUTE_ETCD_KEY"):
        Settings.from_env({"GPUROUTE_ETCD_CERT": pem})
    with pytest.raises(ConfigError, match="GPUROUTE_ETCD_KEY is set without GPUROUTE_ETCD_CERT"):
        Settings.from_env({"GPUROUTE_ETCD_KEY": pem})
    with pytest.raises(ConfigError, match=r"GPUROUTE_REGISTRY is etcd:// .* use etcds://"):
        Settings.from_env({"GPUROUTE_REGISTRY": "etcd://h:2379", "GPUROUTE_ETCD_CA": pem})
    assert Settings.from_env({"GPUROUTE_REGISTRY": "etcds://h:2379", "GPUROUTE_ETCD_CA": pem}).etcd_ca == pem


def test_a_short_timeout_does_not_contradict_the_default_connect_timeout() -> None:
    assert Settings.from_env({"GPUROUTE_TIMEOUT": "500ms"}).timeout == 0.5


def test_precedence_argument_environment_pool_default() -> None:
    stated = PoolSpec("stated", (), PoolConfig(policy="p2c", timeout=1.0, attempts=1))
    registry = FakeRegistry({"stated": stated, "silent": PoolSpec("silent")})
    settings = Settings.from_env({"GPUROUTE_ATTEMPTS": "5"}, timeout=7.5, zone=None)
    sources = [settings.source(name) for name in ("timeout", "attempts", "policy", "zone")]
    assert sources == ["argument", "environment", "default", "default"]
    with Router(registry, settings=settings) as router:
        rules = router.pool("stated").rules
        assert (rules.timeout, rules.retry.attempts, rules.policy) == (7.5, 5, "p2c")
        assert router.pool("silent").rules.policy == "auto"


def test_stating_the_default_is_stating_it() -> None:
    registry = FakeRegistry({"stated": PoolSpec("stated", (), PoolConfig(policy="p2c", attempts=9))})
    settings = Settings.from_env({"GPUROUTE_POLICY": "auto"}, attempts=3)
    with Router(registry, settings=settings) as router:
        rules = router.pool("stated").rules
        assert (rules.policy, rules.retry.attempts) == ("auto", 3)


def test_typed_arguments_keep_their_exact_value() -> None:
    settings = Settings(timeout=1 / 3, retry_budget=0.07, disabled=True, fallback_url="http://x/v1")
    assert settings.timeout == 1 / 3
    assert settings.retry_budget == pytest.approx(0.07)
    assert settings.source("timeout") == "argument"


def test_secret_from_file(tmp_path: Path) -> None:
    path = tmp_path / "password"
    path.write_text(f"{CANARY}\n")
    environ = {"GPUROUTE_ETCD_USER": "u", "GPUROUTE_ETCD_PASSWORD_FILE": str(path)}
    assert Settings.from_env(environ).etcd_password == Secret(CANARY)
    with pytest.raises(ConfigError, match="GPUROUTE_ETCD_PASSWORD and GPUROUTE_ETCD_PASSWORD_FILE are both set"):
        Settings.from_env({**environ, "GPUROUTE_ETCD_PASSWORD": CANARY})
    path.write_text("\n")
    with pytest.raises(ConfigError, match=r"GPUROUTE_ETCD_PASSWORD_FILE='.*' is empty"):
        Settings.from_env(environ)
    path.write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError, match="cannot be read: not UTF-8 text"):
        Settings.from_env(environ)
    path.unlink()
    with pytest.raises(ConfigError, match="cannot be read: No such file"):
        Settings.from_env(environ)


def test_a_secret_that_is_a_file_is_what_the_file_has_now(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "password"
    path.write_text("first\n")
    environ = {"GPUROUTE_ETCD_USER": "u", "GPUROUTE_ETCD_PASSWORD_FILE": "password", "GPUROUTE_REGISTRY": "etcd://h"}
    monkeypatch.chdir(tmp_path)
    router = Router(settings=Settings.from_env(environ))
    monkeypatch.chdir("/")
    secrets = [router.settings.etcd_password, router._source.config.password]  # type: ignore[union-attr]
    path.write_text("second\n")
    assert [secret.latest() for secret in secrets] == ["second"] * 2
    assert [secret.reveal() for secret in secrets] == ["first"] * 2
    for unusable in (b"", b"\n", b"\xff\xfe"):  # such as one that is just being written
        path.write_bytes(unusable)
        assert secrets[0].latest() == "first"
    path.unlink()
    assert secrets[0].latest() == "first"
    os.mkfifo(path)  # nobody writes into it, so that opening it takes for ever
    assert secrets[0].latest() == "first"


def test_c4_secrets_never_show(caplog: pytest.LogCaptureFixture) -> None:
    environ = {"GPUROUTE_ETCD_USER": "u", "GPUROUTE_ETCD_PASSWORD": CANARY, "GPUROUTE_SALT": CANARY}
    with caplog.at_level(logging.DEBUG):
        settings = Settings.from_env(environ)
    assert settings.etcd_password is not None
    assert settings.etcd_password.reveal() == CANARY
    forms = [
        repr(settings),
        str(settings),
        f"{settings.etcd_password} {settings.etcd_password!r}",
        repr(dataclasses.asdict(settings)),
        json.dumps(dataclasses.asdict(settings), default=str),
        repr(copy.deepcopy(settings)),
        repr(settings.effective()),
        caplog.text,
    ]
    assert [form for form in forms if CANARY in form] == []
    with pytest.raises(TypeError, match="cannot be pickled"):
        pickle.dumps(settings)


@pytest.mark.parametrize(
    "wrong",
    [
        {"ATTEMPTS": "x"},
        {"REGISTRY": f"etcd://root:{CANARY}@h:2379"},
        {"FALLBACK_URL": f"http://root:{CANARY}@h/"},
        {"ETCD_USER": ""},
    ],
)
def test_c4_errors_and_the_locals_of_their_frames_hide_secrets(wrong: dict[str, str]) -> None:
    environ = {"GPUROUTE_ETCD_USER": "u", "GPUROUTE_ETCD_PASSWORD": CANARY, "GPUROUTE_SALT": CANARY}
    environ |= {f"GPUROUTE_{name}": text for name, text in wrong.items()}
    with pytest.raises(ConfigError) as caught:
        Settings.from_env(environ)
    own_frames = caught.value.__traceback__.tb_next  # type: ignore[union-attr]  # without this test's own locals
    report = traceback.TracebackException(ConfigError, caught.value, own_frames, capture_locals=True)
    text = "".join(report.format())
    assert "from_env" in text
    assert CANARY not in text


def test_secret_compares_and_copies_like_a_value() -> None:
    one, other = Secret("a"), Secret("a")
    assert one == other
    assert hash(one) == hash(other)
    assert one != "a"
    assert copy.copy(one) is one
    assert not Secret("")


def test_every_row_documents_itself_and_shows_what_it_parses() -> None:
    for row in rows():
        form = row.metadata["form"]
        assert row.metadata["doc"].endswith(".")
        if row.default is not None:
            again = form.parse(form.show(row.default))
            assert again == (pytest.approx(row.default) if isinstance(again, float) else row.default)
        assert is_secret(row) == (form is SECRET)
