from __future__ import annotations

import logging
import os
import subprocess
import sys
from pathlib import Path

import pytest
from jit.jit_helpers import ALONE

from gristmill.errors import GristmillError, SettingsError
from gristmill.log import forget_warnings, logger, warn_once
from gristmill.settings import VARIABLES, path_variables, reload_settings, settings


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch):
    for variable in VARIABLES:
        monkeypatch.delenv(variable.name, raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setenv("HOME", "/home/someone")
    yield monkeypatch
    monkeypatch.undo()
    logger.setLevel(logging.NOTSET)
    reload_settings()


def test_defaults() -> None:
    found = reload_settings()
    assert found.cache_dir == Path("/home/someone/.cache/gristmill")
    assert (found.jit, found.table, found.log, dict(found.use)) == (True, "on", "warning", {})
    assert found.vllm == frozenset()
    assert found.debug is False
    assert (found.tune, found.record, found.batch_invariant) == ("off", None, False)


def test_each_variable_is_read(environment) -> None:
    environment.setenv("GRISTMILL_CACHE_DIR", "~/kernels")
    environment.setenv("GRISTMILL_JIT", "off")
    environment.setenv("GRISTMILL_USE", " rms_norm:cuda_block , add_rms_norm:library,")
    environment.setenv("GRISTMILL_TABLE", "OFF")
    environment.setenv("GRISTMILL_LOG", "debug")
    environment.setenv("GRISTMILL_VLLM", "nvfp4, Norms,")
    environment.setenv("GRISTMILL_DEBUG", "1")
    environment.setenv("GRISTMILL_TUNE", "First-Call")
    environment.setenv("GRISTMILL_RECORD", "~/met.jsonl")
    environment.setenv("GRISTMILL_BATCH_INVARIANT", "1")
    found = reload_settings()
    assert found.cache_dir == Path("/home/someone/kernels")
    assert found.jit is False
    assert dict(found.use) == {"rms_norm": "cuda_block", "add_rms_norm": "library"}
    assert found.table == "off"
    assert found.log == "debug"
    assert found.vllm == {"norms", "nvfp4"}
    assert found.debug is True
    assert found.tune == "first-call"
    assert found.record == Path("/home/someone/met.jsonl")
    assert found.batch_invariant is True
    assert logger.getEffectiveLevel() == logging.DEBUG


def test_the_program_may_set_the_level_itself(environment) -> None:
    logger.setLevel(logging.INFO)
    reload_settings()
    assert logger.level == logging.INFO
    environment.setenv("GRISTMILL_LOG", "error")
    reload_settings()
    assert logger.level == logging.ERROR


def test_parsed_once(environment) -> None:
    reload_settings()
    environment.setenv("GRISTMILL_JIT", "off")
    assert settings().jit is True
    assert settings() is settings()
    assert reload_settings().jit is False


@pytest.mark.parametrize(
    ("shared", "expected"),
    [
        ("/var/tmp/shared", "/var/tmp/shared/gristmill"),
        ("relative/ignored", "/home/someone/.cache/gristmill"),
        ("", "/home/someone/.cache/gristmill"),
    ],
)
def test_xdg_cache_home(environment, shared: str, expected: str) -> None:
    environment.setenv("XDG_CACHE_HOME", shared)
    assert reload_settings().cache_dir == Path(expected)


def test_relative_paths_are_made_absolute(environment, tmp_path: Path) -> None:
    environment.chdir(tmp_path)
    environment.setenv("GRISTMILL_CACHE_DIR", "here")
    environment.setenv("GRISTMILL_RECORD", "there/met.jsonl")
    found = reload_settings()
    environment.chdir("/")
    assert found.cache_dir == tmp_path / "here"
    assert found.record == tmp_path / "there" / "met.jsonl"


@pytest.mark.parametrize("name", ["CACHE_DIR", "CACHE_LAYERS", "RECORD"])
def test_relative_paths_in_a_deleted_folder(environment, tmp_path: Path, name: str) -> None:
    (tmp_path / "gone").mkdir()
    environment.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    environment.setenv(f"GRISTMILL_{name}", "here")
    with pytest.raises(SettingsError, match=rf"GRISTMILL_{name}='here': .*No such file"):
        reload_settings()


def test_a_relative_layer_in_a_folder_with_a_separator(environment, tmp_path: Path) -> None:
    place = tmp_path / f"a{os.pathsep}b"
    place.mkdir()
    environment.chdir(place)
    environment.setenv("GRISTMILL_CACHE_LAYERS", "here")
    with pytest.raises(SettingsError, match=r"GRISTMILL_CACHE_LAYERS: .* has ':' in it"):
        reload_settings()


def test_tables_have_three_settings(environment) -> None:
    environment.setenv("GRISTMILL_TABLE", "none")
    assert reload_settings().table == "none"


def test_empty_means_unset(environment) -> None:
    environment.setenv("GRISTMILL_JIT", "")
    environment.setenv("GRISTMILL_CACHE_DIR", "  ")
    found = reload_settings()
    assert found.jit is True
    assert found.cache_dir == Path("/home/someone/.cache/gristmill")


NOBODY = "~nobody-of-this-name/a"
MISTAKES = [
    ("GRISTMILL_CACHE_DIR", NOBODY, [f"GRISTMILL_CACHE_DIR='{NOBODY}'", "home directory"]),
    ("GRISTMILL_CACHE_LAYERS", f"/a:{NOBODY}", [f"GRISTMILL_CACHE_LAYERS='{NOBODY}'"]),
    ("GRISTMILL_RECORD", NOBODY, [f"GRISTMILL_RECORD='{NOBODY}'"]),
    ("GRISTMILL_NVTX", "yes", ["GRISTMILL_NVTX='yes'", "0, 1"]),
    ("GRISTMILL_DEBUG", "on", ["GRISTMILL_DEBUG='on'", "0, 1"]),
    ("GRISTMILL_JIT", "of", ["GRISTMILL_JIT='of'", "did you mean off", "on, off"]),
    ("GRISTMILL_TABLE", "1", ["GRISTMILL_TABLE='1'", "on, off, none"]),
    ("GRISTMILL_TUNE", "first", ["GRISTMILL_TUNE='first'", "did you mean first-call"]),
    ("GRISTMILL_BATCH_INVARIANT", "yes", ["GRISTMILL_BATCH_INVARIANT='yes'", "0, 1"]),
    ("GRISTMILL_LOG", "warn", ["GRISTMILL_LOG='warn'", "did you mean warning"]),
    ("GRISTMILL_USE", "rms_norm", ["GRISTMILL_USE", "'rms_norm'", "op:variant"]),
    ("GRISTMILL_USE", "a:b:c", ["GRISTMILL_USE", "'a:b:c'", "op:variant"]),
    ("GRISTMILL_USE", "a:b,a:c", ["GRISTMILL_USE", "twice", "b and c"]),
    ("GRISTMILL_VLLM", "nvfp4,norm", ["GRISTMILL_VLLM", "'norm'", "did you mean norms"]),
    ("GRISTMILL_VLLM", "on", ["GRISTMILL_VLLM", "'on'", "norms, nvfp4"]),
]


def test_every_setting_has_a_mistake() -> None:
    assert {name for name, _, _ in MISTAKES} == {variable.name for variable in VARIABLES}


@pytest.mark.parametrize(("name", "value", "words"), MISTAKES)
def test_mistakes_are_named(environment, name: str, value: str, words: list[str]) -> None:
    environment.setenv(name, value)
    with pytest.raises(SettingsError) as caught:
        reload_settings()
    for word in words:
        assert word in str(caught.value)
    assert isinstance(caught.value, GristmillError)
    assert isinstance(caught.value, ValueError)


OF_A_SERVICE = [
    *("GRISTMILL_SERVICE_HOST", "GRISTMILL_SERVICE_PORT", "GRISTMILL_SERVICE_PORT_HTTP_2"),
    *("GRISTMILL_PORT", "GRISTMILL_PORT_8000_TCP", "GRISTMILL_PORT_8000_TCP_PROTO"),
    *("GRISTMILL_PORT_8000_TCP_PORT", "GRISTMILL_PORT_53_UDP_ADDR", "GRISTMILL_PORT_9_SCTP"),
    *("GRISTMILL_CACHE_SERVICE_HOST", "GRISTMILL_MY_CACHE_PORT", "GRISTMILL_CACHE_PORT_80_TCP"),
]


@pytest.mark.parametrize("name", OF_A_SERVICE)
def test_what_kubernetes_sets_for_a_service_is_ignored(environment, caplog, name: str) -> None:
    forget_warnings()
    environment.setenv(name, "tcp://10.0.0.1:8000")
    environment.setenv("GRISTMILL_JIT", "off")
    assert reload_settings().jit is False
    assert caplog.messages == []


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("GRISTMILL_JITT", "(did you mean GRISTMILL_JIT?)"),
        ("GRISTMILL_CACHEDIR", "(did you mean GRISTMILL_CACHE_DIR?)"),
        ("GRISTMILL_SUPPORT", "is ignored"),
        ("GRISTMILL_PORTS", "is ignored"),
        ("GRISTMILL_PORT_8000", "is ignored"),
        ("GRISTMILL_PORT_HTTP_TCP", "is ignored"),
        ("GRISTMILL_PORT_8000_TCP_ADDRESS", "is ignored"),
        ("GRISTMILL_SERVICE_HOSTS", "is ignored"),
        ("GRISTMILL_", "is ignored"),
    ],
)
def test_an_unknown_name_is_one_warning(environment, caplog, name: str, words: str) -> None:
    forget_warnings()
    environment.setenv(name, "on")
    environment.setenv("GRISTMILL_JIT", "off")
    for _ in range(3):
        assert reload_settings().jit is False
    (message,) = caplog.messages
    assert message.startswith(f"{name!r} is not a setting of gristmill")
    assert words in message


def test_an_unknown_name_does_not_hide_a_mistake(environment, caplog) -> None:
    forget_warnings()
    environment.setenv("GRISTMILL_JITT", "on")
    environment.setenv("GRISTMILL_JIT", "of")
    with pytest.raises(SettingsError, match="GRISTMILL_JIT='of'"):
        reload_settings()


@pytest.mark.parametrize("name", ["GRISTMILLS_JIT", "GRISTMILL", "gristmill_jit", "gristmill_port"])
def test_names_without_the_prefix_are_not_looked_at(environment, caplog, name: str) -> None:
    forget_warnings()
    environment.setenv(name, "nonsense")
    assert reload_settings().jit is True
    assert caplog.messages == []


@pytest.mark.parametrize(
    ("name", "shown"),
    [
        ("GRISTMILL_\x1b[31mJIT\n\t", r"'GRISTMILL_\x1b[31mJIT\n\t' is not a setting"),
        ("GRISTMILL_\udcff", r"'GRISTMILL_\udcff' is not a setting"),
        ("GRISTMILL_JIT ", "'GRISTMILL_JIT ' is not a setting"),
        ("GRISTMILL_" + "A" * 5000, "AAA...AAA"),
    ],
)
def test_a_name_is_shown_in_one_line(environment, caplog, name: str, shown: str) -> None:
    forget_warnings()
    environment.setenv(name, "on")
    reload_settings()
    (message,) = caplog.messages
    assert shown in message
    assert message.isprintable()
    assert len(message) < 300


def test_many_unknown_names_do_not_fill_a_log(environment, caplog) -> None:
    forget_warnings()
    for number in range(100):
        environment.setenv(f"GRISTMILL_X{number}", "on")
    reload_settings()
    assert len(caplog.messages) == 16


def test_values_that_are_not_utf_8(environment) -> None:
    environment.setenv("GRISTMILL_CACHE_DIR", "/somewhere/\udcff")
    environment.setenv("GRISTMILL_PORT", "\udcff")
    assert reload_settings().cache_dir == Path("/somewhere/\udcff")
    assert path_variables()["GRISTMILL_CACHE_DIR"] == "/somewhere/\udcff"
    environment.setenv("GRISTMILL_JIT", "\udcff")
    with pytest.raises(SettingsError, match=r"GRISTMILL_JIT='\\udcff' is not allowed"):
        reload_settings()


def test_the_level_holds_for_the_warning(environment) -> None:
    """One process: the warning is the first line that the logger gets."""
    code = "from gristmill.settings import settings; settings(); print(settings().log)"
    said = {}
    for level in ("warning", "error"):
        done = subprocess.run(
            [sys.executable, "-c", ALONE + code],
            env={"GRISTMILL_JITT": "on", "GRISTMILL_LOG": level, "HOME": "/nonexistent"},
            capture_output=True,
            text=True,
            check=True,
        )
        assert done.stdout == f"{level}\n"
        said[level] = done.stderr
    assert said["error"] == ""
    assert said["warning"].count("\n") == 1
    assert said["warning"].startswith("gristmill: warning: 'GRISTMILL_JITT' is not a setting")


def test_paths_for_a_process_in_another_folder(environment, tmp_path: Path) -> None:
    environment.chdir(tmp_path)
    environment.setenv("GRISTMILL_CACHE_DIR", "here")
    environment.setenv("GRISTMILL_CACHE_LAYERS", "a:~/b")
    reload_settings()
    before = settings()
    environment.chdir("/")
    assert path_variables() == {
        "GRISTMILL_CACHE_DIR": str(tmp_path / "here"),
        "GRISTMILL_CACHE_LAYERS": f"{tmp_path}/a:/home/someone/b",
    }
    for name, value in path_variables().items():
        environment.setenv(name, value)
    assert reload_settings() == before


def test_without_a_home_there_is_no_folder(environment) -> None:
    def unknown() -> Path:
        raise RuntimeError("Could not determine home directory.")

    environment.delenv("HOME")
    environment.setattr(Path, "home", unknown)
    assert reload_settings().cache_dir is None


def test_layers_are_paths_in_order(environment) -> None:
    assert reload_settings().cache_layers == ()
    environment.setenv(
        "GRISTMILL_CACHE_LAYERS", f"/opt/a.bundle:: ~/b :{Path.cwd()}/c:/opt/a.bundle"
    )
    expected = ("/opt/a.bundle", "/home/someone/b", f"{Path.cwd()}/c")
    assert reload_settings().cache_layers == tuple(map(Path, expected))


def test_every_variable_is_described() -> None:
    for variable in VARIABLES:
        assert variable.name.startswith("GRISTMILL_")
        assert variable.help
        assert variable.values


def test_warn_once(caplog: pytest.LogCaptureFixture) -> None:
    forget_warnings()
    for message in ("first", "second"):
        warn_once("a", message)
    warn_once("b", "third")
    assert caplog.messages == ["first", "third"]


def test_warnings_are_seen_without_a_log_and_not_doubled_with_one(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logging.getLogger(), "handlers", [])
    logger.warning("degrading because of %s", "reasons")
    assert capsys.readouterr().err == "gristmill: warning: degrading because of reasons\n"
    monkeypatch.setattr(logging.getLogger(), "handlers", [logging.NullHandler()])
    logger.warning("again")
    assert capsys.readouterr().err == ""
