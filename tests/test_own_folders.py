"""Folders that others could change are refused on the way to code; folders of a usual cluster are accepted."""

from __future__ import annotations

import os
import shutil
import stat
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from hybridtron import own_folders
from hybridtron.compiled import NotBuilt, cache_folder, load
from hybridtron.own_folders import NotOwn, own_folder

OTHER = 1234  # a user and a group
NAMES = ("hybridtron", "native")
as_root = pytest.mark.skipif(os.getuid() != 0, reason="only root can give folders to other users")


def opened(base: Path) -> Path:
    with own_folder(base, *NAMES) as folder:
        return folder.path


@pytest.fixture
def no_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))


@pytest.fixture
def shared() -> Iterator[Path]:
    """A folder that every user can reach, as /scratch is."""
    folder = Path(tempfile.mkdtemp(prefix="hybridtron-shared-"))
    folder.chmod(0o755)
    yield folder
    shutil.rmtree(folder)


def test_absent_folders_are_created_for_the_user_alone(tmp_path: Path) -> None:
    path = opened(tmp_path / "a" / "b")
    assert path == tmp_path / "a" / "b" / "hybridtron" / "native"
    for folder in (path, path.parent, tmp_path / "a" / "b", tmp_path / "a"):
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700


@as_root
@pytest.mark.parametrize("depth", range(4), ids=["native", "hybridtron", "base", "above"])
def test_folder_of_another_user_is_refused(depth: int, tmp_path: Path, no_home: None) -> None:
    path = opened(tmp_path / "above" / "base")
    folder = (path, *path.parents)[depth]
    os.chown(folder, OTHER, 0)
    with pytest.raises(NotOwn, match=rf"^{folder} .*\(1234\)$"):
        opened(tmp_path / "above" / "base")


@pytest.mark.parametrize("depth", range(4), ids=["native", "hybridtron", "base", "above"])
def test_folder_that_all_users_can_change_is_refused(depth: int, tmp_path: Path, no_home: None) -> None:
    path = opened(tmp_path / "above" / "base")
    folder = (path, *path.parents)[depth]
    folder.chmod(0o777)
    with pytest.raises(NotOwn, match=rf"^{folder} .*chmod go-w {folder}$"):
        opened(tmp_path / "above" / "base")
    folder.chmod(0o1777)  # as /tmp
    assert opened(tmp_path / "above" / "base") == path


@as_root
def test_folder_that_a_group_can_change_is_refused(tmp_path: Path, no_home: None) -> None:
    path = opened(tmp_path)
    os.chown(path, 0, OTHER)
    path.chmod(0o770)
    with pytest.raises(NotOwn, match=rf"\(1234\): chmod g-w {path}$"):
        opened(tmp_path)
    os.chown(path, 0, 0)
    assert opened(tmp_path) == path, "root's own group, in which nobody else is"


@pytest.mark.parametrize(
    ("name", "members", "primary", "alone"),
    [
        ("ada", [], 77, True),
        ("ada", ["ada"], 77, True),
        ("ada", ["ada", "bob"], 77, False),
        ("users", [], 77, False),  # whose primary group it is, is not listed
        ("ada", [], 78, False),
    ],
)
def test_group_of_one_user_is_recognized(
    name: str, members: list[str], primary: int, alone: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    user = own_folders.pwd.struct_passwd(("ada", "x", 1000, primary, "", "/home/ada", "/bin/sh"))
    group = own_folders.grp.struct_group((name, "x", 77, members))
    monkeypatch.setattr(own_folders.pwd, "getpwuid", lambda _: user)
    monkeypatch.setattr(own_folders.grp, "getgrgid", lambda _: group)
    assert own_folders._of_one_user(77) is alone


@pytest.mark.parametrize("depth", range(2), ids=["native", "hybridtron"])
def test_link_below_the_base_is_not_followed(depth: int, tmp_path: Path) -> None:
    path = opened(tmp_path / "base")
    link = (path, *path.parents)[depth]
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    shutil.rmtree(link)
    link.symlink_to(elsewhere)
    with pytest.raises(NotOwn, match=rf"^{link} .*link"):
        opened(tmp_path / "base")
    assert not [*elsewhere.iterdir()]


def test_links_up_to_the_base_are_resolved(tmp_path: Path) -> None:
    (tmp_path / "data" / "caches").mkdir(parents=True)
    (tmp_path / "base").symlink_to(tmp_path / "data" / "caches")
    (tmp_path / "disk").symlink_to(tmp_path / "data")
    real = tmp_path / "data" / "caches" / "hybridtron" / "native"
    assert opened(tmp_path / "base") == opened(tmp_path / "disk" / "caches") == real


def test_circular_link_is_refused(tmp_path: Path) -> None:
    (tmp_path / "base").symlink_to(tmp_path / "base")
    with pytest.raises(OSError, match="base"):
        opened(tmp_path / "base")


@as_root
def test_homes_on_a_disk_of_another_account_are_accepted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """/home leads to a disk owned by another account; folders beside the home there are not trusted."""
    homes = tmp_path / "disk" / "homes"
    (homes / "me").mkdir(parents=True)
    os.chown(homes, OTHER, OTHER)
    (tmp_path / "home").symlink_to(homes)
    monkeypatch.setenv("HOME", str(tmp_path / "home" / "me"))
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    assert cache_folder("native") == homes / "me" / ".cache" / "hybridtron" / "native"
    monkeypatch.setenv("XDG_CACHE_HOME", str(homes / "caches"))
    with pytest.raises(NotBuilt, match=r"homes .*\(1234\) \(XDG_CACHE_HOME"):
        cache_folder("native")
    (homes / "me").chmod(0o777)
    monkeypatch.delenv("XDG_CACHE_HOME")
    with pytest.raises(NotBuilt, match=r"me .*chmod go-w"):
        cache_folder("native")


@as_root
@pytest.mark.parametrize("ending", ["", ".sha256"])
def test_library_of_another_user_is_not_loaded(ending: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    folder = cache_folder("native")
    for name in ("x.so", "x.so.sha256"):
        (folder / name).write_text("")
    os.chown(folder / f"x.so{ending}", OTHER, OTHER)
    with pytest.raises(NotBuilt, match=rf"x\.so{ending} .*\(1234\)"):
        load("native", "x.so", lambda _: pytest.fail("compiled"))


def test_library_that_all_users_can_change_is_not_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with own_folder(tmp_path, *NAMES) as folder:
        (folder.path / "x.so").write_text("")
        (folder.path / "x.so").chmod(0o777)
        with pytest.raises(OSError, match="changed"):
            folder.open("x.so")


def as_user(user: int, task: Callable[[], object]) -> str:
    """Run a task as another user; return its result or its error as text."""
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        os.setgroups([])
        os.setgid(user)
        os.setuid(user)
        try:
            said = str(task())
        except BaseException as error:
            said = f"{type(error).__name__}: {error}"
        os.write(write, said.encode())
        os._exit(0)
    os.close(write)
    os.waitpid(child, 0)
    with os.fdopen(read) as file:
        return file.read()


@as_root
def test_folder_that_another_user_created_first_is_refused(shared: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another user makes /scratch/hybridtron, and waits for one whose cache would be in it."""
    monkeypatch.setenv("HOME", "/nowhere")
    shared.chmod(0o1777)
    victim = 1000
    path = shared / "hybridtron" / "native"
    assert as_user(victim, lambda: opened(shared)) == str(path), "a sticky folder of root's will do"
    shutil.rmtree(path.parent)
    path.parent.mkdir()
    os.chown(path.parent, OTHER, OTHER)
    path.parent.chmod(0o777)
    path.mkdir(0o700)
    os.chown(path, victim, victim)  # as if the victim had made it there
    said = as_user(victim, lambda: opened(shared))
    assert said.startswith(f"NotOwn: {path.parent} ")


@as_root
def test_folders_below_unlistable_ones_are_accepted(shared: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/nowhere")
    (shared / "mine").mkdir(0o700)
    os.chown(shared / "mine", 1000, 1000)
    shared.chmod(0o711)
    assert as_user(1000, lambda: opened(shared / "mine")) == str(shared / "mine" / "hybridtron" / "native")
