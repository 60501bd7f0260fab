"""Shared fixtures.

Torch runs on one thread, so that a test's arithmetic does not depend on the machine's cores.
"""

import functools
import gc
import os
import signal
import ssl
import sys
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import httpx
import pytest
from hypothesis import settings

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.pop("COLUMNS", None)  # pytest's workers have one; a pipe has no width

# A run started in the background of a shell script ignores SIGINT, and so would every process that
# a test interrupts.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:  # as under nohup
    signal.signal(signal.SIGHUP, signal.SIG_DFL)

# Each `httpx.get` loads all certificates into a context of its own, and gives a server on a busy
# machine 5 s.
ssl.create_default_context = functools.cache(ssl.create_default_context)
vars(httpx._config.DEFAULT_TIMEOUT_CONFIG).update(
    dict.fromkeys(("connect", "read", "write", "pool"), 300)
)

settings.register_profile("without a clock", deadline=None)
settings.load_profile("without a clock")

# what importing and collecting makes stays, and is not searched for garbage, then or later
gc.disable()


def pytest_collection_finish() -> None:
    gc.freeze()
    gc.enable()


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    """Gives torch one thread in modules that imported it; others do not pay for the import."""
    torch = sys.modules.get("torch")
    if torch is not None and torch.get_num_threads() != 1:
        torch.set_num_threads(1)


@pytest.fixture(scope="module")
def room() -> Iterator[Path]:
    """A directory, in memory if there is some, for thousands of tiny files with an fsync each."""
    with TemporaryDirectory(
        dir="/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    ) as directory:
        yield Path(directory)


@pytest.fixture(scope="session")
def target_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny BF16 target of eight layers."""
    from tests.tiny import make_target

    return make_target(tmp_path_factory.mktemp("target"), layers=8)


@pytest.fixture(scope="session")
def upstream_data() -> Path:
    """Files of other projects that the project does not carry; TRTSPEC_UPSTREAM_DATA names them."""
    place = os.environ.get("TRTSPEC_UPSTREAM_DATA")
    if not place or not Path(place).is_dir():
        pytest.skip("TRTSPEC_UPSTREAM_DATA does not name a directory of upstream files")
    return Path(place)
