"""Compiled libraries are loaded as they were written or made again, by one of the processes that start at once."""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from hybridtron import compiled
from hybridtron.compiled import LoadedLibrary, NotBuilt, compiler, load, run_compiler
from tests.damage import put, truncations, zeroed_pages

ROOT = Path(__file__).parents[1]
NAME = "answer.so"


@pytest.fixture(scope="session")
def answer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A library with one function, compiled once."""
    folder = tmp_path_factory.mktemp("answer")
    source = folder / "answer.cpp"
    source.write_text('extern "C" int answer() { return 42; }\n')
    run_compiler(compiler(), ["-shared", "-fPIC", str(source)], folder / NAME)
    return folder / NAME


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty cache; descriptors of libraries that tests have loaded are closed after each."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "hybridtron" / "native"


@pytest.fixture
def makes(answer: Path, tmp_path: Path) -> Callable[[Path], None]:
    """A compiler that takes no time and writes a line at each call."""

    def make(target: Path) -> None:
        with (tmp_path / "made").open("a") as file:
            file.write("once\n")
        shutil.copy(answer, target)

    return make


def times_made(tmp_path: Path) -> int:
    log = tmp_path / "made"
    if not log.exists():
        return 0
    return len(log.read_text().splitlines())


def test_library_is_compiled_once_and_kept_with_its_record(
    cache: Path, makes: Callable[[Path], None], tmp_path: Path
) -> None:
    for _ in range(2):
        loaded = load("native", NAME, makes)
        assert loaded.functions.answer() == 42
        assert loaded.repaired == ""
    assert times_made(tmp_path) == 1
    assert sorted(path.name for path in cache.iterdir()) == [NAME, f"{NAME}.lock", f"{NAME}.sha256"]
    size, digest, name = (cache / f"{NAME}.sha256").read_text().split()
    printed = subprocess.run(["sha256sum", cache / NAME], capture_output=True, text=True, check=True).stdout
    assert (int(size), digest, name) == ((cache / NAME).stat().st_size, printed.split()[0], NAME)


DAMAGES = {
    "cut": lambda whole: truncations(whole, 20, time.time_ns()),
    "page of zeros": lambda whole: zeroed_pages(whole, 20, time.time_ns()),
    "the lengths of an empty file and of few bytes": lambda whole: iter([b"", b"\x7f", whole[:1000], whole + b"\0"]),
}


@pytest.mark.parametrize("kind", DAMAGES)
def test_damaged_library_is_compiled_again(
    kind: str, cache: Path, answer: Path, makes: Callable[[Path], None], tmp_path: Path
) -> None:
    load("native", NAME, makes)
    whole = answer.read_bytes()
    for number, damaged in enumerate(DAMAGES[kind](whole), 2):
        put(cache / NAME, damaged)
        loaded = load("native", NAME, makes)
        assert str(cache / NAME) in loaded.repaired
        assert times_made(tmp_path) == number, "not made again"
        assert (cache / NAME).read_bytes() == whole
        assert loaded.functions.answer() == 42


def test_library_with_a_damaged_record_is_compiled_again(
    cache: Path, makes: Callable[[Path], None], tmp_path: Path
) -> None:
    load("native", NAME, makes)
    record = cache / f"{NAME}.sha256"
    for number, damaged in enumerate([b"", bytes(80), b"9" * 5000, record.read_bytes()[:-1]], 2):
        record.write_bytes(damaged)
        assert load("native", NAME, makes).repaired
        assert times_made(tmp_path) == number
    record.unlink()
    assert "record" in load("native", NAME, makes).repaired


def test_renamed_library_is_compiled_again(cache: Path, makes: Callable[[Path], None], tmp_path: Path) -> None:
    """A library that somebody renamed with its record, to save a compilation, is made again."""
    load("native", "other.so", makes)
    for ending in ("", ".sha256"):
        shutil.copy(cache / f"other.so{ending}", cache / f"{NAME}{ending}")
    assert load("native", NAME, makes).repaired
    assert times_made(tmp_path) == 2


def as_folder(path: Path) -> None:
    (path / "within").mkdir(parents=True)


def as_link(path: Path) -> None:
    path.symlink_to("/etc/passwd")


@pytest.mark.parametrize("put", [as_folder, as_link, os.mkfifo], ids=["folder", "link", "pipe"])
@pytest.mark.parametrize("ending", ["", ".sha256"])
def test_other_things_in_the_place_of_a_library_are_moved(
    put: Callable[[Path], None], ending: str, cache: Path, makes: Callable[[Path], None]
) -> None:
    load("native", NAME, makes)
    place = cache / f"{NAME}{ending}"
    place.unlink()
    put(place)
    loaded = load("native", NAME, makes)
    assert str(place) in loaded.repaired
    assert place.is_file()
    assert not place.is_symlink()
    if put is as_folder:
        assert (cache / f"{NAME}{ending}.moved" / "within").is_dir(), "nothing is removed"


def test_immovable_folder_in_the_place_of_a_library_is_a_reason(
    cache: Path, makes: Callable[[Path], None], tmp_path: Path
) -> None:
    for name in (NAME, f"{NAME}.moved"):
        as_folder(cache / name)
    with pytest.raises(NotBuilt, match=rf"{NAME}.*folder"):
        load("native", NAME, makes)
    assert times_made(tmp_path) == 0


def test_library_that_does_not_load_is_not_compiled_again(cache: Path, tmp_path: Path) -> None:
    """A library with the bytes that the compiler wrote would fail again after another compilation."""

    def make(target: Path) -> None:
        with (tmp_path / "made").open("a") as file:
            file.write("once\n")
        target.write_bytes(b"no library at all")

    for _ in range(2):
        with pytest.raises(NotBuilt, match=rf"{NAME}: "):
            load("native", NAME, make)
    assert times_made(tmp_path) == 1


def test_checked_file_is_the_one_that_is_loaded(
    cache: Path, makes: Callable[[Path], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If another process exchanges a file after it was read, the new file is not loaded."""
    load("native", NAME, makes)
    source = tmp_path / "other.cpp"
    source.write_text('extern "C" int answer() { return 666; }\n')
    run_compiler(compiler(), ["-shared", "-fPIC", str(source)], tmp_path / NAME)
    checked = compiled.open_whole

    def exchanged(*arguments: object) -> object:
        file = checked(*arguments)  # type: ignore[arg-type]
        (tmp_path / NAME).replace(cache / NAME)
        return file

    monkeypatch.setattr(compiled, "open_whole", exchanged)
    assert load("native", NAME, makes).functions.answer() == 42


def starts(count: int, cache: Path, program: str) -> list[str]:
    """Start several processes at once; return their outputs."""
    environment = {**os.environ, "XDG_CACHE_HOME": str(cache.parents[1]), "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", program]
    running = [
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment)
        for _ in range(count)
    ]
    return [process.communicate(timeout=60)[0] for process in running]


AT_ONCE = """
import time
from hybridtron import compiled
compiled.SILENT_S = 0.2

def make(target):
    with open({made!r}, "a") as file:
        file.write("once\\n")
    time.sleep(3)
    {then}

try:
    print(compiled.load("native", "answer.so", make).functions.answer())
except compiled.NotBuilt as error:
    print(error)
"""


def test_several_processes_compile_a_library_once(cache: Path, answer: Path, tmp_path: Path) -> None:
    then = f"import shutil; shutil.copy({str(answer)!r}, target)"
    said = starts(4, cache, AT_ONCE.format(made=str(tmp_path / "made"), then=then))
    assert [text.splitlines()[-1] for text in said] == ["42"] * 4
    assert times_made(tmp_path) == 1
    assert sum("waiting" in text and str(cache / NAME) in text for text in said) == 3


@pytest.mark.slow
def test_waiting_processes_do_not_repeat_a_failed_compilation(cache: Path, tmp_path: Path) -> None:
    then = "raise compiled.NotBuilt('the compiler is broken')"
    said = starts(4, cache, AT_ONCE.format(made=str(tmp_path / "made"), then=then))
    assert [text.splitlines()[-1] for text in said] == ["the compiler is broken"] * 4
    assert times_made(tmp_path) == 1


def test_later_start_compiles_again_after_a_failure(cache: Path, makes: Callable[[Path], None]) -> None:
    def fails(target: Path) -> None:
        raise NotBuilt("full")

    with pytest.raises(NotBuilt, match="full"):
        load("native", NAME, fails)
    assert load("native", NAME, makes).functions.answer() == 42


def test_waiting_for_another_compilation_has_a_limit(
    cache: Path, makes: Callable[[Path], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compiled, "BUILD_S", 0.2)
    cache.mkdir(parents=True)
    with (cache / f"{NAME}.lock").open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        with pytest.raises(NotBuilt, match=rf"{NAME}\.lock"):
            load("native", NAME, makes)
    assert isinstance(load("native", NAME, makes), LoadedLibrary)


def test_library_is_compiled_on_a_file_system_without_locks(
    cache: Path, makes: Callable[[Path], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuses(*_: object) -> None:
        raise OSError(37, "No locks available")

    monkeypatch.setattr(fcntl, "flock", refuses)
    assert load("native", NAME, makes).functions.answer() == 42


def test_compiled_files_are_private_with_any_umask(cache: Path, makes: Callable[[Path], None]) -> None:
    before = os.umask(0)
    try:
        load("native", NAME, makes)
    finally:
        os.umask(before)
    assert not any(path.stat().st_mode & 0o077 for path in (cache, *cache.iterdir()))
