"""Where studies are kept: journals that survive kill -9, addresses that are refused, passwords that nobody sees."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import json
import logging
import os
import pickle
import sys
import traceback
import urllib.parse
from pathlib import Path
from typing import Any

import optuna
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from mgpu_ops.tuning import cli, storage
from mgpu_ops.tuning.ledger import Ledger
from mgpu_ops.tuning.outcome import Outcome
from mgpu_ops.tuning.storage import Identity, StorageError, open_storage, open_study
from tests.thorough import examples
from tests.tuning import toy

VERSIONS = {"driver": "570.1", "jax": "0.11.2", "jaxlib": "0.11.2", "cuda": "13000"}
IDENTITY = Identity.of(toy.SPEC, toy.PROBLEM, toy.GPU, "measured", VERSIONS)
SECRET = "hunter2"


# --- passwords

PASSWORDS = st.text(st.characters(min_codepoint=33, max_codepoint=126), min_size=6)


@given(password=PASSWORDS)
@example("p@ss/w#or?d")
@example("a:b@c")
def test_redact_leaves_nothing_of_a_password_escaped_or_not(password: str) -> None:
    url = f"postgresql://tuner:{password}@db.example/studies"
    whole = "postgresql://tuner:***@db.example/studies"
    assert storage.redact(url) == ("postgresql://***" if "@" in password else whole)
    assert storage.redact(f"cannot open {url}") == f"cannot open {storage.redact(url)}"
    assert storage.has_password(url)


SECRETS = st.text(st.characters(codec="utf-8"), max_size=8).map(lambda text: f"{text}hunter2{text}")
URLS = (
    "postgresql://tuner:{}@127.0.0.1:9/db",
    "postgresql://tuner@myserver:{}@127.0.0.1:9/db",  # as some clouds name users
    "mysql://tuner%40myserver:{}@127.0.0.1:9/db",
    "postgresql+psycopg://:{}@/db?host=/nowhere",
    "postgresql://tuner@127.0.0.1:9/db?password={}",
    "postgresql://tuner@127.0.0.1:9/db?sslmode=disable&pass%77ord={}&x=y",
    "postgresql://tuner@127.0.0.1:9/db?a=b&pass%2577ord={}",
    "postgresql://tuner@127.0.0.1:9/db?options=-c password={}",
    "postgresql://tuner@127.0.0.1:9/host=h password={}",
    "postgresql://tuner%3A{}@127.0.0.1:9/db",
    "postgresql:/tuner:{}@127.0.0.1:9/db",
    " postgres://tuner:{}@127.0.0.1:9/db",
    "POSTGRESQL://tuner:{}@127.0.0.1:9/db",
    "postgre-sql://tuner:{}@127.0.0.1:9/db",
    "sqlite://tuner:{}@127.0.0.1:9/db",
    "grpc://tuner:{}@127.0.0.1:9",
    "grpc://127.0.0.1:9/?token={}",
)


@pytest.mark.parametrize("form", URLS)
@given(secret=SECRETS, quoted=st.booleans())
@example(secret="hunter2", quoted=False)
@example(secret="a b\thunter2", quoted=False)
@example(secret="a:b@c/d?e#hunter2", quoted=False)
@example(secret="a:b@c/d?e#hunter2", quoted=True)
@example(secret="a\nhunter2", quoted=False)
@example(secret="&hunter2&", quoted=False)
@examples(10)
def test_a_secret_of_a_url_is_in_no_word_that_is_said_of_it(form: str, secret: str, quoted: bool) -> None:
    """Neither on the command line, where it is refused, nor from the environment, where it is taken."""
    url = form.format(urllib.parse.quote(secret, safe="") if quoted else secret)
    assert "hunter2" not in storage.redact(url)
    assert "hunter2" not in storage.redact(f"cannot open {url}")
    assert storage.has_password(url)
    said, log = io.StringIO(), logging.StreamHandler(io.StringIO())
    logging.getLogger().addHandler(log)
    try:
        with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
            patch.setenv("NPROC", "64")  # else `main` sets it, for all tests that follow
            patch.setattr(storage, "_made", unreachable)
            assert cli.main(["merge", "--storage", url, "--into", "x.json"]) == 2
            if "\0" not in url:
                patch.setenv(storage.VARIABLE, url)
                assert cli.main(["merge", "--storage", "--into", "x.json"]) == 2
            with pytest.raises(StorageError) as caught:
                open_storage(url)
    finally:
        logging.getLogger().removeHandler(log)
    told = said.getvalue() + log.stream.getvalue() + "".join(traceback.format_exception_only(caught.value))
    assert "hunter2" not in told


def unreachable(url: str, *_: int) -> Any:
    """A database that does not answer, and a driver that says all it knows."""
    import sqlalchemy.exc

    password = sqlalchemy.engine.make_url(url).password
    raise sqlalchemy.exc.OperationalError("select", {}, OSError(f"cannot reach {url} with {password!r} ({password})"))


@pytest.mark.parametrize(
    "where", ["studies.journal", "/a/b:c@d.journal", "postgresql://tuner@db.example:5432/studies", "grpc://127.0.0.1:13000"]
)
def test_what_holds_no_password_stays_as_it_is(where: str) -> None:
    assert storage.redact(where) == where
    assert not storage.has_password(where)


def test_a_password_among_the_options_of_a_url_is_one_too() -> None:
    assert storage.redact("mysql://u@h/d?a=1&password=hunter2&b=2") == "mysql://u@h/d?***"
    assert storage.redact("mysql://u@h/d?charset=utf8mb4") == "mysql://u@h/d?charset=utf8mb4"


@pytest.mark.parametrize(
    "url",
    [
        f"postgresql://tuner:{SECRET}@127.0.0.1:1/studies",  # nobody listens
        f"mysql://tuner:{SECRET}@127.0.0.1:1/studies",  # its driver is an extra that may be missing
        f"postgresql://tuner:{SECRET}@127.0.0.1:port/studies",
        f"postgresql://tuner:{SECRET}/x@y@127.0.0.1/studies",  # not escaped
        f"postgresql://tuner:{SECRET}@[::1/studies",
        f"oracle://tuner:{SECRET}@127.0.0.1/studies",
        f"grpc://tuner:{SECRET}@127.0.0.1",
        f"grpc://tuner:{SECRET}@[::",
    ],
)
def test_no_error_of_a_storage_tells_its_password(url: str, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    with pytest.raises(StorageError) as caught:
        open_storage(url)
    told = "".join(traceback.format_exception(caught.value)) + caplog.text
    assert SECRET not in told.replace(__file__, "")
    assert "***" in str(caught.value) or "pip install" in str(caught.value) or "grpc://HOST:PORT" in str(caught.value)


def test_an_error_later_on_tells_no_password_either() -> None:
    import sqlalchemy.exc

    url = f"postgresql://tuner:{SECRET}%21@db.example/studies"
    with (
        pytest.raises(StorageError, match=r"postgresql://tuner:\*\*\*@db.example/studies: ") as caught,
        storage.as_storage_errors(url),
    ):
        raise sqlalchemy.exc.OperationalError("select", {}, ValueError(f"bad dsn {url} with {SECRET}! and {SECRET}%21"))
    assert SECRET not in "".join(traceback.format_exception(caught.value)).replace(__file__, "")


def test_a_bug_is_not_taken_for_an_error_of_the_storage() -> None:
    with pytest.raises(ZeroDivisionError), storage.as_storage_errors("x"):
        1 / 0  # noqa: B018


# --- addresses


@pytest.mark.parametrize(
    ("where", "reason"),
    [
        ("sqlite:///studies.db", "sqlite:///studies.db is no storage: name a journal file, postgresql://USER@HOST/NAME"),
        ("grpc://somewhere", "is no address of a proxy: name it as grpc://HOST:PORT"),
        ("postgresql://u:a/b@h/d", "write @ / # ? [ ] of the password as %40 %2F"),
    ],
)
def test_what_is_no_storage_is_refused_with_the_way_out(where: str, reason: str) -> None:
    with pytest.raises(StorageError) as caught:
        open_storage(where)
    assert reason in str(caught.value)


def test_a_journal_that_cannot_be_made_is_refused_with_its_path(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(StorageError, match=r"file/studies\.journal"):
        open_storage(tmp_path / "file" / "studies.journal")


# --- the journal


def measured(path: Path, count: int) -> Ledger:
    """A journal with so many results."""
    ledger = Ledger(open_study(open_storage(path), IDENTITY), toy.Config)
    for a in toy.CHOICES["a"][:count]:
        config = dataclasses.replace(toy.DEFAULT, a=a)
        assert ledger.claim(config, "search")
        ledger.record(config, Outcome("ok", toy.slope(config)))
    return ledger


def test_a_journal_keeps_studies_from_process_to_process(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "studies.journal"
    measured(path, 3)
    again = Ledger(open_study(open_storage(path), IDENTITY), toy.Config)
    assert [done.config.a for done in again.new_results()] == [1, 2, 4]


@pytest.fixture(scope="module")
def journal(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    path = tmp_path_factory.mktemp("journal") / "studies.journal"
    measured(path, 3)
    return path.read_bytes()


@given(cut=st.integers(1, 700))
@example(cut=1)
def test_a_journal_cut_off_anywhere_loses_its_last_lines_only_and_takes_new_ones(
    cut: int, journal: bytes, tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = tmp_path_factory.mktemp("journal") / "studies.journal"
    path.write_bytes(journal[:-cut])
    ledger = Ledger(open_study(open_storage(path), IDENTITY), toy.Config)
    assert [d.config.a for d in ledger.new_results()] in ([1, 2, 4], [1, 2], [1])
    config = dataclasses.replace(toy.DEFAULT, a=64)
    assert ledger.claim(config, "search")
    ledger.record(config, Outcome("ok", 1.0))
    ledger.close()
    for line in path.read_bytes().splitlines():
        json.loads(line)
    assert config in [d.config for d in Ledger(open_study(open_storage(path), IDENTITY), toy.Config).new_results()]


def test_a_journal_cut_off_within_its_first_record_takes_new_ones(journal: bytes, tmp_path: Path) -> None:
    path = tmp_path / "studies.journal"
    path.write_bytes(journal[: journal.index(b"\n")])
    measured(path, 2)
    assert len(Ledger(open_study(open_storage(path), IDENTITY), toy.Config).new_results()) == 2


@pytest.mark.parametrize(
    "content",
    [
        *(b"\x80\x04K\x01.\n{}\n", b"[1]\n[2]\n", b'{"op_code":0}\n{}\n', b"1\n2\n"),
        *(b"hello", b'{"schema": 1, "entries": []}', b"{\n", b"\n", b"\x00"),  # optuna passes over a last line that is none
    ],
)
def test_a_file_that_is_no_journal_is_refused_and_left_as_it_is(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "studies.journal"
    path.write_bytes(content)
    with pytest.raises(StorageError, match=r"is no journal of optuna, or is corrupt .*: move it away"):
        open_storage(path)
    assert path.read_bytes() == content


@pytest.mark.parametrize(
    ("sound", "broken"),
    [
        (b'"system_attrs":{}', b'"system_attrs":3'),
        (b'"directions":[1]', b'"directions":1'),
        (b'"op_code":4', b'"op_code":400'),
        (b'"op_code":4', b'"op_code":"'),
    ],
)
def test_a_journal_with_a_broken_line_is_refused_in_one_line(
    sound: bytes, broken: bytes, journal: bytes, tmp_path: Path
) -> None:
    path = tmp_path / "studies.journal"
    path.write_bytes(journal.replace(sound, broken, 1))
    with pytest.raises(StorageError) as caught, storage.opened(path) as backend:
        Ledger(open_study(backend, IDENTITY), toy.Config)
    assert f"{path} is no journal of optuna, or is corrupt" in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("sound", "broken", "left"),
    [
        (b'"directions":[1]', b'"directions":[1,1]', 3),  # of another program
        (b'"config":{"a":1', b'"config":{"a":"\\ud800"', 2),
        (b'"config":{"a":1', b'"config":{"a":null', 2),
    ],
)
def test_a_trial_that_is_none_of_ours_is_passed_over(
    sound: bytes, broken: bytes, left: int, journal: bytes, tmp_path: Path
) -> None:
    path = tmp_path / "studies.journal"
    path.write_bytes(journal.replace(sound, broken, 1))
    with storage.opened(path) as backend:
        assert len(Ledger(open_study(backend, IDENTITY), toy.Config).new_results()) == left


def test_a_pipe_in_place_of_a_journal_is_refused_at_once(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "studies.journal")
    with pytest.raises(StorageError, match=r"studies.journal: is no regular file: name another with --storage"):
        open_storage(tmp_path / "studies.journal")


def test_reading_unpickles_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "studies.journal"
    measured(path, 2)
    study = open_study(open_storage(path), IDENTITY)
    trap = pickle.dumps(os.getcwd).hex()  # where optuna's CMA-ES sampler would look for one
    study.add_trial(optuna.trial.create_trial(value=1.0, system_attrs={"cma:optimizer:0": trap}))
    for name in ("load", "loads", "Unpickler"):
        monkeypatch.setattr(pickle, name, lambda *args, **kwargs: pytest.fail("something was unpickled"))
    again = open_study(open_storage(path), IDENTITY, sampler=optuna.samplers.TPESampler(seed=0))
    assert len(Ledger(again, toy.Config).new_results()) == 2


def test_no_sampler_on_offer_unpickles() -> None:
    from mgpu_ops.tuning import search

    assert "cmaes" not in search.SAMPLERS
    modules = {type(search.sampler_of(name, 0)).__module__ for name in ("tpe", "random")}
    sources = [Path(sys.modules[module].__file__ or "").read_text() for module in modules]
    assert not any("pickle" in source for source in sources)


def test_a_users_journals_lie_in_the_state_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MGPU_OPS_STATE_DIR", str(tmp_path))
    assert storage.journal_path("h200", "toy") == tmp_path / "studies" / "h200" / "toy.journal"
    monkeypatch.delenv("MGPU_OPS_STATE_DIR")
    monkeypatch.setenv("XDG_STATE_HOME", "/somewhere")
    assert storage.journal_path("h200", "toy") == Path("/somewhere/mgpu_ops/studies/h200/toy.journal")


# --- which measurements may meet


@pytest.mark.parametrize(
    "change",
    [
        {"op": "other"},
        {"kernel_version": 4},
        {"problem": {"size": 2048}},
        {"problem": {"size": True}},
        {"gpu": "NVIDIA H100 80GB HBM3"},
        {"kind": "modelled"},
        *({"versions": VERSIONS | {key: "another"}} for key in VERSIONS),
    ],
    ids=str,
)
def test_only_the_same_problem_on_the_same_gpu_and_toolchain_shares_a_study(change: dict[str, Any]) -> None:
    backend = optuna.storages.InMemoryStorage()
    study = open_study(backend, IDENTITY)
    assert open_study(backend, IDENTITY)._study_id == study._study_id
    assert open_study(backend, dataclasses.replace(IDENTITY, **change))._study_id != study._study_id


def test_a_study_is_named_for_people_and_fits_a_database() -> None:
    import mgpu_ops

    name = IDENTITY.name("1")
    for word in ("toy", "1024", "NVIDIA H200", "measured", "driver 570.1", "jax 0.11.2", "kernel 3", "run 1"):
        assert word in name.split(" | ")
    for spec in mgpu_ops.SPECS.values():
        for problem in spec.shapes.values():
            assert len(Identity.of(spec, problem, toy.GPU, "measured", VERSIONS).name("fleet 12")) < 512


def test_a_run_goes_on_until_it_is_done_and_the_next_starts_anew() -> None:
    backend = optuna.storages.InMemoryStorage()
    first = open_study(backend, IDENTITY)
    assert open_study(backend, IDENTITY).study_name == first.study_name
    storage.finish(first, None)
    second = open_study(backend, IDENTITY)
    assert second.study_name != first.study_name
    assert open_study(backend, IDENTITY).study_name == second.study_name
    assert open_study(backend, IDENTITY, fresh=True).study_name not in (first.study_name, second.study_name)
