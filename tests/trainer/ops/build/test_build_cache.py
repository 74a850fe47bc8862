"""Build cache: concurrent and killed builders, missing locks, other users, disused files."""

import errno
import fcntl
import multiprocessing
import os
import stat
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.trainer.ops.build.slow_builder import NAME, TIMEOUT_S, make_slowly, obtain
from trainer.ops.build import build_lock
from trainer.ops.build.build_cache import BuildCache, is_intact, read_sealed
from trainer.ops.build.build_lock import hold_lock, mark_in_use
from trainer.ops.build.build_settings import BuildError
from trainer.ops.build.object_cache import ObjectCache

SPAWN = multiprocessing.get_context("spawn")


@pytest.fixture
def cache(tmp_path):
    return BuildCache(tmp_path / "shared/kernels", tmp_path / "node/kernels")


def test_of_many_processes_one_builds_and_the_others_wait_for_it(tmp_path):
    answers = SPAWN.Queue()
    processes = [SPAWN.Process(target=obtain, args=(tmp_path, answers)) for _ in range(4)]
    for process in processes:
        process.start()
    found = [answers.get(timeout=TIMEOUT_S) for _ in processes]
    for process in processes:
        process.join(timeout=TIMEOUT_S)
    assert {path for path, _ in found} == {str(tmp_path / "shared/kernels" / NAME)}
    assert read_sealed(tmp_path / "shared/kernels" / NAME) == b"all of it"
    assert len((tmp_path / "builds").read_text().split()) == 1
    assert all(len(said) <= 1 for _, said in found)


def test_a_waiting_process_names_the_builder_and_has_a_limit(cache, tmp_path):
    (tmp_path / "shared/kernels/key").mkdir(parents=True)
    said = []
    lock = (cache.shared / NAME).with_suffix(".lock")
    with (
        build_lock.hold_lock(lock, time.monotonic() + 1.0, said.append),
        pytest.raises(BuildError, match=f"process {os.getpid()}.*still building"),
    ):
        cache.obtain(NAME, make_slowly, said.append, limit_s=1.5)
    assert said == [
        f"kernels: waiting for another process ({os.uname().nodename}, process {os.getpid()}) to build them"
    ]
    assert not (cache.shared / NAME).exists()


def test_a_killed_builder_frees_the_lock_and_its_leftovers_are_removed(cache, tmp_path):
    answers = SPAWN.Queue()
    process = SPAWN.Process(target=obtain, args=(tmp_path, answers))
    process.start()
    end = time.monotonic() + TIMEOUT_S
    while not list(tmp_path.glob("shared/kernels/key/.build-*/compiler.so")):
        assert time.monotonic() < end and process.is_alive()
        time.sleep(0.01)
    process.kill()
    process.join()
    (left,) = tmp_path.glob("shared/kernels/key/.build-*")
    assert cache.find(NAME) is None
    assert cache.obtain(NAME, make_slowly, print, limit_s=TIMEOUT_S) == cache.shared / NAME
    assert not left.exists()
    assert sorted(path.name for path in (cache.shared / "key").iterdir()) == ["compiler.lock", "compiler.so"]


def test_a_build_that_fails_leaves_nothing(cache):
    def fail(target, _):
        target.write_bytes(b"half")
        raise BuildError("no")

    with pytest.raises(BuildError, match="no"):
        cache.obtain(NAME, fail, print)
    assert [path.name for path in (cache.shared / "key").iterdir()] == ["compiler.lock"]


@pytest.mark.parametrize("damage", ["truncated", "altered", "renamed"])
def test_a_damaged_file_is_built_again(cache, damage):
    path = cache.obtain(NAME, make_slowly_here, print)
    if damage == "renamed":
        path = path.rename(path.with_name("other.so"))
    else:
        content = path.read_bytes()
        path.write_bytes(content[:-1] if damage == "truncated" else b"A" + content[1:])
    assert not is_intact(path)
    assert cache.find(f"key/{path.name}") is None
    assert cache.find_any("key/*.so") is None
    assert read_sealed(cache.obtain(f"key/{path.name}", make_slowly_here, print)) == b"built"


def make_slowly_here(target, _):
    target.write_bytes(b"built")


def test_an_unusable_file_is_replaced_once(cache):
    first = cache.obtain(NAME, make_slowly_here, print)
    built = []

    def make(target, _):
        built.append(target)
        target.write_bytes(b"better")

    second = cache.obtain(NAME, make, print, instead_of=first)
    assert second == first and read_sealed(second) == b"better" and len(built) == 1


def test_without_locks_each_node_builds_its_own(cache, monkeypatch):
    lock = fcntl.flock

    def no_locks(descriptor, operation):
        if Path(f"/proc/self/fd/{descriptor}").readlink().is_relative_to(cache.shared):
            raise OSError(errno.ENOLCK, "No locks available")
        lock(descriptor, operation)

    monkeypatch.setattr(fcntl, "flock", no_locks)
    path = cache.obtain(NAME, make_slowly_here, print)
    assert path == cache.of_node / NAME == cache.find(NAME)
    assert stat.S_IMODE(cache.of_node.parent.stat().st_mode) == 0o700
    assert list(cache.shared.rglob("*.so")) == []


def test_without_a_folder_for_temporary_files_the_cache_is_read(tmp_path, monkeypatch):
    path = BuildCache(tmp_path / "kernels", tmp_path / "node/kernels").obtain(NAME, make_slowly_here, print)

    def none_usable():
        raise FileNotFoundError(errno.ENOENT, "No usable temporary directory found")

    monkeypatch.setattr(tempfile, "gettempdir", none_usable)
    assert BuildCache.below(tmp_path).find(NAME) == path


@pytest.mark.parametrize("error", [errno.ENOSPC, errno.EDQUOT, errno.EOPNOTSUPP])
def test_a_compiler_that_fails_on_a_full_disk_is_run_again_in_the_folder_of_the_node(cache, monkeypatch, error):
    def full(descriptor, *_):
        if Path(f"/proc/self/fd/{descriptor}").readlink().is_relative_to(cache.shared):
            raise OSError(error, os.strerror(error))

    def make(target, _):
        if target.is_relative_to(cache.shared):
            raise BuildError("the assembler failed")
        target.write_bytes(b"built")

    monkeypatch.setattr(os, "posix_fallocate", full)
    said = []
    if error == errno.EOPNOTSUPP:
        with pytest.raises(BuildError, match="the assembler failed"):
            cache.obtain(NAME, make, said.append)
        return
    assert cache.obtain(NAME, make, said.append) == cache.of_node / NAME
    assert said == [f"kernels: {cache.shared}: {os.strerror(error)}; builds are kept in {cache.of_node}"]
    assert list(cache.shared.rglob(".build-*")) == []


@pytest.mark.parametrize("place", ["", "key", NAME, "key/compiler.lock"])
def test_the_folder_of_the_node_replaces_a_cache_with_a_wrong_file_type(cache, place):
    taken = cache.shared / place
    taken.parent.mkdir(parents=True, exist_ok=True)
    if "." in place:
        taken.mkdir()
    else:
        taken.write_text("")
    assert cache.obtain(NAME, make_slowly_here, print) == cache.of_node / NAME


@pytest.mark.parametrize("error", [errno.EROFS, errno.EACCES, errno.EDQUOT])
def test_the_folder_of_the_node_replaces_a_read_only_one(cache, monkeypatch, error):
    make_folder = Path.mkdir

    def refused(self, *arguments, **options):
        if self.is_relative_to(cache.shared.parent):
            raise OSError(error, os.strerror(error), str(self))
        make_folder(self, *arguments, **options)

    monkeypatch.setattr(Path, "mkdir", refused)
    assert cache.obtain(NAME, make_slowly_here, print) == cache.of_node / NAME


def test_a_read_only_cache_is_read(cache, monkeypatch):
    path = cache.obtain(NAME, make_slowly_here, print)
    monkeypatch.setattr(os, "open", refuse_to_write)
    assert cache.obtain(NAME, make_slowly, print) == path


def refuse_to_write(path, *_):
    raise OSError(errno.EROFS, "Read-only file system", path)


def test_the_folder_of_the_node_replaces_one_mounted_noexec(cache, monkeypatch):
    assert cache.obtain(NAME, make_slowly_here, print) == cache.shared / NAME
    status = os.statvfs(cache.shared)
    marked = SimpleNamespace(f_flag=status.f_flag | os.ST_NOEXEC)
    monkeypatch.setattr(os, "statvfs", lambda folder: marked if Path(folder) == cache.shared else status)
    # Existing files cannot be loaded either.
    assert cache.find(NAME) is None
    said = []
    assert cache.obtain(NAME, make_slowly_here, said.append) == cache.of_node / NAME == cache.find(NAME)
    assert said == [
        f"kernels: {cache.shared} is on a file system that is mounted noexec; builds are kept in {cache.of_node}"
    ]


def test_no_folder_at_all(tmp_path):
    (tmp_path / "file").touch()
    cache = BuildCache(tmp_path / "file/kernels", tmp_path / "file/node/kernels")
    with pytest.raises(BuildError, match="Not a directory.*LLMCTL_CACHE_DIR"):
        cache.obtain(NAME, make_slowly_here, print)


def test_nothing_is_used_from_a_folder_that_others_may_write(cache):
    elsewhere = BuildCache(cache.of_node, cache.shared)
    path = elsewhere.obtain(NAME, make_slowly_here, print)
    cache.of_node.parent.chmod(0o777)
    assert path == cache.of_node / NAME and is_intact(path)
    assert cache.find(NAME) is None
    cache.shared.parent.write_text("no folder")
    with pytest.raises(BuildError, match="writable by others"):
        cache.obtain(NAME, make_slowly_here, print)


def test_nothing_is_used_from_a_cache_that_others_may_write(cache):
    """Who may write the outer folder may replace the folder of a build."""
    cache.obtain(NAME, make_slowly_here, print)
    cache.shared.chmod(0o777)
    assert cache.find(NAME) is None
    assert str(cache.shared) in cache.distrusted("key/*.so")


@pytest.fixture
def folder_of_node(cache):
    """The node's folder, with a build."""
    place = cache.of_node.parent
    place.mkdir(mode=0o700)
    BuildCache(cache.of_node, cache.shared).obtain(NAME, make_slowly_here, print)
    assert cache.find(NAME) == cache.of_node / NAME
    return place


def test_nothing_is_used_from_a_folder_of_the_node_behind_a_link(cache, folder_of_node):
    """Who owns the link may point it at another folder of this user."""
    place = folder_of_node
    place.rename(place.with_name("elsewhere"))
    place.symlink_to("elsewhere")
    assert cache.find(NAME) is None


@pytest.mark.skipif(os.getuid() != 0, reason="only root can give a folder away")
def test_nothing_is_used_from_a_folder_of_the_node_that_another_user_made(cache, folder_of_node, monkeypatch):
    give_away(folder_of_node, monkeypatch)
    assert cache.find(NAME) is None


def give_away(path, monkeypatch):
    """Make another user the owner of a file or folder."""
    if os.getuid() == 0:
        os.chown(path, 4321, 4321)
    else:
        monkeypatch.setattr(os, "getuid", lambda: 4321)


@pytest.mark.parametrize("of_another", [False, True], ids=["writable by the group", "of another user"])
def test_a_file_that_others_could_have_written_is_replaced_with_a_line(cache, monkeypatch, of_another):
    path = cache.obtain(NAME, make_slowly_here, print)
    if of_another:
        give_away(path, monkeypatch)
    else:
        path.chmod(0o660)
    assert cache.find(NAME) is None and cache.find_any("key/*.so") is None and read_sealed(path) is None
    assert str(path) in cache.distrusted("key/*.so")
    said = []
    monkeypatch.undo()
    if not of_another or os.getuid() == 0:
        assert cache.obtain(NAME, make_slowly_here, said.append) == path == cache.find(NAME)
        assert said == [
            f"kernels: {path} belongs to another user or is writable by others; the file is ignored and replaced"
        ]


def test_folders_are_ours_alone_whatever_the_umask(cache):
    before = os.umask(0)
    try:
        path = cache.obtain(NAME, make_slowly_here, print)
    finally:
        os.umask(before)
    assert [stat.S_IMODE(place.stat().st_mode) for place in (cache.shared, path.parent)] == [0o700] * 2
    assert not stat.S_IMODE(path.stat().st_mode) & 0o022
    # A folder made by an earlier version, or by hand.
    path.parent.chmod(0o775)
    assert cache.find(NAME) is None
    assert cache.obtain(NAME, make_slowly_here, print) == path == cache.find(NAME)
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o755


@pytest.mark.skipif(os.getuid() != 0, reason="only root can give a folder away")
def test_the_folder_of_the_node_replaces_that_of_another_user_with_a_line(cache, monkeypatch):
    cache.shared.mkdir(parents=True)
    give_away(cache.shared, monkeypatch)
    said = []
    assert cache.obtain(NAME, make_slowly_here, said.append) == cache.of_node / NAME
    assert said == [
        f"kernels: {cache.shared}: belongs to another user or is writable by others; builds are kept in {cache.of_node}"
    ]


def test_objects_of_others_are_not_linked(tmp_path):
    (tmp_path / "kernels").mkdir(mode=0o700)
    (tmp_path / "made.o").write_bytes(b"object")
    objects = ObjectCache(tmp_path / "kernels/objects")
    objects.keep("a.o", tmp_path / "made.o")
    assert objects.take("a.o", tmp_path / "taken.o") and (tmp_path / "taken.o").read_bytes() == b"object"
    (tmp_path / "kernels/objects/a.o").chmod(0o666)
    assert not objects.take("a.o", tmp_path / "other.o")
    assert not objects.take("b.o", tmp_path / "other.o")
    assert not (tmp_path / "other.o").exists() and not (tmp_path / "kernels/objects/b.o").exists()


def age(path, days):
    then = time.time() - days * 24 * 3600
    os.utime(path, (then, then))


def test_old_builds_are_removed_except_the_last_few_and_those_in_use(cache):
    names = [f"machine-{number}/compiler.so" for number in range(7)]
    paths = [cache.obtain(name, make_slowly_here, print) for name in names]
    other = cache.obtain("images-0/sm_90.cubin", make_slowly_here, print)
    left = paths[6].parent / ".build-compiler.so-elsewhere-x"
    left.mkdir()
    for number, path in enumerate(paths):
        age(path, 100 + number)
    age(other, 1000)
    age(left, 1000)
    age(paths[3], 10)
    mark = mark_in_use(paths[4])
    cache.remove_disused("machine-*/*.so")
    # The three most recently used are 3, 0 and 1; 4 is in use; 2 and 5 are removed completely.
    assert [path.exists() for path in paths] == [True, True, False, True, True, False, False]
    assert not paths[2].parent.exists() and not left.exists()
    assert other.exists()
    os.close(mark)
    cache.remove_disused("machine-*/*.so")
    assert not paths[4].exists()
    with pytest.raises(FileNotFoundError):
        mark_in_use(paths[4])
    assert read_sealed(cache.obtain(names[4], make_slowly_here, print)) == b"built"


def test_running_builds_are_not_removed_and_finding_counts_as_use(cache):
    paths = [cache.obtain(f"machine-{number}/compiler.so", make_slowly_here, print) for number in range(5)]
    for path in paths:
        age(path, 100)
    assert cache.find("machine-3/compiler.so") == paths[3]
    assert time.time() - paths[3].stat().st_mtime < 100
    with hold_lock(paths[4].with_suffix(".lock"), time.monotonic() + 10.0, print):
        age(paths[4], 200)
        cache.remove_disused("machine-*/*.so")
    assert paths[3].exists() and paths[4].exists()


def test_a_lock_on_a_file_that_was_removed_meanwhile_does_not_count(tmp_path, monkeypatch):
    path, take, taken = tmp_path / "lock", build_lock._take, []

    def take_too_late(descriptor, path, *more):
        taken.append(descriptor)
        take(descriptor, path, *more)
        if len(taken) == 1:
            path.unlink()

    monkeypatch.setattr(build_lock, "_take", take_too_late)
    with hold_lock(path, time.monotonic() + 10.0, print):
        assert len(taken) == 2 and path.exists()
        with build_lock.hold_if_free(path) as is_free:
            assert not is_free
