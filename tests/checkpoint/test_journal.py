"""Journals of runs that resume, their lock, and shards that have no name until they are whole."""

import os
import resource
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file

from tests.command_line import printed
from trtspec.checkpoint.tensors import DTYPES
from trtspec.checkpoint.writer import Journal, ShardFile, layout_of, read_journal, write_shard
from trtspec.errors import TrtspecError, UsageError

HEADER = {"source": "abc", "options": {"policy": "k2.5"}}


HOLD = """
import pathlib, sys, time
from trtspec.checkpoint.writer import Journal
from trtspec.errors import UsageError
try:
    with Journal(pathlib.Path(sys.argv[1]), {}) as journal:
        print("held", flush=True)
        sys.stdin.readline()
        journal.record(sys.argv[2])
except UsageError as error:
    print(error.message, error.remedy, flush=True)
"""


def without_flock(directory: Path, error: str) -> dict[str, str]:
    """An environment in which flock fails as on file systems without it, with this errno."""
    compiler, shim = shutil.which("gcc"), directory / f"{error}.so"
    if compiler is None:
        pytest.skip("no gcc here")
    code = (
        "#include <errno.h>\n"
        f"int flock(int file, int how) {{ (void)file; (void)how; errno = {error}; return -1; }}"
    )
    printed(compiler, "-shared", "-fPIC", "-o", shim, "-xc", "-", input=code)
    return os.environ | {"LD_PRELOAD": str(shim)}


def hold(path: Path, key: str, environment: dict[str, str]) -> subprocess.Popen[str]:
    command, pipe = [sys.executable, "-c", HOLD, str(path), key], subprocess.PIPE
    return subprocess.Popen(
        command, stdin=pipe, stdout=pipe, stderr=pipe, text=True, env=environment
    )


@pytest.mark.parametrize("name", ["ENOSYS", "ENOLCK", "EOPNOTSUPP"])
@pytest.mark.clock
def test_where_there_is_no_flock_a_file_is_the_lock(tmp_path, tmp_path_factory, name):
    path, environment = tmp_path / "j", without_flock(tmp_path_factory.mktemp("shim"), name)
    first = hold(path, "one", environment)
    assert first.stdout is not None and first.stdout.readline() == "held\n"
    assert (tmp_path / "j.lock").is_file()
    refused, _ = hold(path, "two", environment).communicate()
    assert f"another run is writing {tmp_path} (it holds j.lock, as process {first.pid})" in refused
    assert f"remove {tmp_path / 'j.lock'}" in refused
    _, told = first.communicate("\n")
    assert "file system without flock; j.lock is the lock instead" in told
    assert list(tmp_path.iterdir()) == [path]
    killed = hold(path, "three", environment)
    assert killed.stdout is not None and killed.stdout.readline() == "held\n"
    killed.kill()
    killed.wait()
    after, _ = hold(path, "four", environment).communicate("\n")
    assert after == "held\n" and set(read_journal(path)[1]) == {"one", "four"}
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.clock
def test_a_holder_on_another_machine_is_believed(tmp_path, tmp_path_factory):
    environment = without_flock(tmp_path_factory.mktemp("shim"), "ENOSYS")
    (tmp_path / "j.lock").write_text("12\nnode7\n")
    refused, _ = hold(tmp_path / "j", "one", environment).communicate()
    assert "it holds j.lock, as process 12" in refused
    (tmp_path / "j.lock").unlink()
    assert hold(tmp_path / "j", "one", environment).communicate("\n")[0] == "held\n"


def test_a_second_run_finds_what_the_first_recorded(tmp_path):
    with Journal(tmp_path / "j", HEADER) as journal:
        journal.record("shard-1", sha256="x")
    with Journal(tmp_path / "j", HEADER) as journal:
        assert journal.done == {"shard-1": {"key": "shard-1", "sha256": "x"}}


@pytest.mark.parametrize("cut", range(1, 30))
def test_a_torn_last_line_is_cut_off(tmp_path, cut):
    path = tmp_path / "j"
    with Journal(path, HEADER) as journal:
        journal.record("one", bytes=1)
        journal.record("two", bytes=2)
    path.write_bytes(path.read_bytes()[:-cut] if cut < 27 else path.read_bytes()[:-26])
    with Journal(path, HEADER) as journal:
        assert list(journal.done) == ["one"]
        journal.record("two", bytes=2)
    with Journal(path, HEADER) as journal:
        assert list(journal.done) == ["one", "two"]


def test_a_header_torn_by_a_kill_starts_afresh(tmp_path):
    (tmp_path / "j").write_bytes(b'{"header": {"sou')
    with Journal(tmp_path / "j", HEADER) as journal:
        assert journal.done == {}


def test_a_foreign_file_is_refused(tmp_path):
    (tmp_path / "j").write_text("hello\n")
    with pytest.raises(UsageError, match="not a journal"):
        Journal(tmp_path / "j", HEADER)


def test_a_killed_process_keeps_every_recorded_line_and_frees_the_lock(tmp_path):
    code = (
        "import sys, pathlib; from trtspec.checkpoint.writer import Journal\n"
        f"j = Journal(pathlib.Path({str(tmp_path / 'j')!r}), {HEADER!r})\n"
        "for i in range(10**6):\n    j.record(str(i)); print(i, flush=True)\n"
    )
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    seen = [process.stdout.readline().strip() for _ in range(20)]
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    with Journal(tmp_path / "j", HEADER) as journal:
        assert set(seen) <= set(journal.done)


def random_tensor(dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    raw = torch.randint(0, 2, shape) if dtype == torch.bool else torch.randint(0, 100, shape)
    return raw.to(dtype)


@given(
    st.dictionaries(
        st.text("abc.é", min_size=1, max_size=8),
        st.tuples(st.sampled_from(sorted(DTYPES)), st.lists(st.integers(0, 5), max_size=3)),
        max_size=8,
    )
)
@settings(max_examples=60)
def test_safetensors_reads_back_every_byte(tmp_path_factory, layout):
    tensors = {
        name: random_tensor(DTYPES[code], tuple(shape)) for name, (code, shape) in layout.items()
    }
    path = tmp_path_factory.mktemp("shard") / "a.safetensors"
    write_shard(path, tensors)
    loaded = load_file(path)
    assert set(loaded) == set(tensors)
    for name, tensor in tensors.items():
        assert loaded[name].dtype == tensor.dtype and loaded[name].shape == tensor.shape
        assert torch.equal(
            loaded[name].reshape(-1).view(torch.uint8), tensor.reshape(-1).view(torch.uint8)
        )


def test_a_shard_has_no_name_until_it_is_whole(tmp_path):
    tensors = {"a": torch.ones(4), "b": torch.zeros(2, dtype=torch.int64)}
    shard = ShardFile(tmp_path / "model.safetensors", layout_of(tensors))
    shard.write("a", tensors["a"])
    with pytest.raises(ValueError, match="1 tensors were not written whole, first b"):
        shard.finish()
    with pytest.raises(ValueError, match="the layout says I64"):
        shard.write("b", tensors["a"])
    assert not list(tmp_path.glob("*.safetensors"))
    shard.abandon()
    assert not list(tmp_path.iterdir())


def test_a_full_disk_is_a_message(tmp_path, monkeypatch):
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, hard))
    try:
        with pytest.raises(TrtspecError, match="cannot write .*model.safetensors"):
            write_shard(tmp_path / "model.safetensors", {"a": torch.ones(4096)})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert not list(tmp_path.iterdir())
