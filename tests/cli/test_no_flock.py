"""Every command that resumes, on a file system without flock: it says what the lock is, and writes the same bytes."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cli.matrix import Recorder
from tests.tiny import make_target

FAILING = "#include <errno.h>\nint flock(int file, int how) { (void)file; (void)how; errno = ENOLCK; return -1; }"


@pytest.fixture(scope="module")
def room(tmp_path_factory: pytest.TempPathFactory) -> Path:
    compiler = shutil.which("gcc")
    if compiler is None:
        pytest.skip("no gcc here")
    room = tmp_path_factory.mktemp("no-flock")
    command = [compiler, "-shared", "-fPIC", "-o", room / "shim.so", "-xc", "-"]
    subprocess.run(command, input=FAILING.encode(), check=True)
    make_target(room / "Kimi-K2.5", layers=7)
    rows = [f"what is {word}" for word in ("red", "green", "blue", "yellow", "white", "black")]
    turns = [[{"role": "user", "content": row}, {"role": "assistant", "content": f"{row} indeed"}] for row in rows]
    lines = [json.dumps({"conversation_id": str(n), "conversations": turn}) for n, turn in enumerate(turns)]
    (room / "data.jsonl").write_text("\n".join(lines) + "\n")
    (room / "prompts.txt").write_text("\n".join(rows))
    return room


def run(room: Path, out: Path, words: str, preload: bool) -> str:
    environment = os.environ | ({"LD_PRELOAD": str(room / "shim.so")} if preload else {})
    text = words.format(target=room / "Kimi-K2.5", data=room / "data.jsonl", prompts=room / "prompts.txt", out=out)
    command = [sys.executable, "-m", "trtspec", *text.split()]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr
    return done.stderr


@pytest.mark.parametrize(
    "words",
    [
        "quantize {target} -o {out}",
        "synthesize {prompts} -o {out} --base-url {url}/v1 --samples 3",
        pytest.param("calibrate {target} {data} -o {out} --samples 3 --seq-len 8", marks=pytest.mark.slow),
    ],
    ids=lambda words: words.split()[0],
)
def test_without_flock(room, tmp_path, words):
    server = Recorder()
    words = words.replace("{url}", server.url)
    outputs = []
    for preload in (False, True):
        out = tmp_path / str(preload) / "out.safetensors"
        out.parent.mkdir()
        told = run(room, out, words, preload)
        assert ("lies on a file system without flock" in told) == preload
        assert not list(tmp_path.rglob("*.lock*")), "no lock stays"
        files = sorted(out.glob("*.safetensors")) if out.is_dir() else [out]
        outputs.append([path.read_bytes() for path in files])
    assert outputs[0] == outputs[1] and outputs[0]
    server.shutdown()
