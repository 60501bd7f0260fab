"""Every command that resumes writes the same bytes without flock, and says what the lock is."""

from pathlib import Path

import pytest

from tests.cases import slow
from tests.checkpoint.test_journal import without_flock
from tests.cli.matrix import Recorder, conversations
from tests.command_line import process
from tests.json_files import write_lines
from tests.tiny import make_target


@pytest.fixture(scope="module")
def room(tmp_path_factory: pytest.TempPathFactory) -> Path:
    room = tmp_path_factory.mktemp("no-flock")
    make_target(room / "Kimi-K2.5", layers=7)
    rows = [f"what is {word}" for word in ("red", "green", "blue", "yellow", "white", "black")]
    write_lines(room / "data.jsonl", conversations(rows))
    write_lines(room / "prompts.jsonl", [{"prompt": row} for row in rows])
    return room


def run(room: Path, out: Path, words: str, preload: bool) -> str:
    text = words.format(
        target=room / "Kimi-K2.5", data=room / "data.jsonl", prompts=room / "prompts.jsonl", out=out
    )
    done = process(*text.split(), **(without_flock(room, "ENOLCK") if preload else {}))
    assert done.status == 0, done
    return done.stderr


@pytest.mark.parametrize(
    "words",
    [
        "quantize {target} -o {out}",
        "synthesize {prompts} -o {out} --base-url {url}/v1 --samples 3",
        slow("calibrate {target} {data} -o {out} --samples 3 --seq-len 8"),
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
