"""The commands of the pages that tests/test_docs_commands.py only parses, run on stand-ins.

kimi-nano for a target, its shipped head for a head, reference servers for endpoints, small files
for data, all of this machine.

STAND_INS maps the words of a page; SMALLER has the options that make a command take seconds. What
is left out is in ELSEWHERE, with the test that runs it or the reason why none can. Captured output
is compared where the command names no stand-in, numbers and addresses apart; such a command runs in
its own size. Minutes, so it is slow.
"""

import contextlib
import json
import os
import re
import shutil
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from tests.command_line import TRTSPEC, free_port, printed, program, served, succeeded, trtspec
from tests.test_docs_commands import PARSED, PLACEHOLDER, not_printed, rehearsed, sizes_only
from tools.pages import PAGES, ROOT, Command, blocks, commands
from tools.pages import name as page_name
from trtspec import data_files

NANO, HEAD = data_files.kimi_nano_dir(), data_files.DATA / "kimi-nano-eagle3"
PUBLISHED, PUBLISHED_HEAD = "nvidia/Kimi-K2.5-NVFP4", "nvidia/Kimi-K2.5-Eagle3"
pytestmark = pytest.mark.slow

STAND_INS = yaml.safe_load((ROOT / "tests" / "docs_stand_ins.yaml").read_text())
# the same, in commands that read configurations or names alone
PUBLISHED_NAMES = {
    "TARGET": PUBLISHED,
    "HEAD": PUBLISHED_HEAD,
    "OUT": PUBLISHED_HEAD,
    "FILE": "file.yml",
}
PLAIN_HOSTS = {"PLAIN", "plain", "BF16"}
BENCH = ["--samples", "6", "--max-tokens", "24", "--concurrency", "2", "--rounds", "3"]
CHECK = ["--samples", "4", "--max-tokens", "32", "--context-tokens", "64"]
TRAIN = ["--steps", "2", "--seq-len", "96", "--batch-size", "2", "--acceptance-prompts", "0"]
SMALLER = {
    "bench": BENCH,
    "check": CHECK,
    "train": TRAIN,
    "synthesize": ["--samples", "3", "--max-tokens", "16"],
}
# verdicts about the stand-ins are not the pages' subject; a bound that a page names is replaced by
# one that holds
EASIER = {"--min-acceptance": "1.05", "--max-regression": "0.99"}
OTHER_VALUES = {"cuda": "cpu", "0/8": "0/1", "$SLURM_ARRAY_TASK_ID/8": "0/1"}
ELSEWHERE = {
    "trtspec demo": "run whole by tests/cli/test_demo.py and by make demo",
    "--features http": (
        "needs an engine that captures states: tests/heads/training/test_features_server.py"
    ),
    "--listen": "runs until it is stopped: tests/bench/test_watch.py",
    "--config configs/train/": "names a published target: tests/heads/test_own_head_page.py",
    "--disaggregated": "three files of build-config: tests/trtllm/test_launch.py",
    "--role": "three files of build-config: tests/trtllm/test_launch.py",
}
OUTCOMES: Counter[str] = Counter()


class Room:
    """A directory with everything that commands name, and three reference servers."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.servers = contextlib.ExitStack()
        self.urls: dict[str, str] = {}
        self.furniture: set[str] = set()

    def tidy(self) -> None:
        """A page starts without what another one wrote."""
        for name in set(os.listdir()) - self.furniture:
            shutil.rmtree(name) if os.path.isdir(name) else os.unlink(name)

    def furnish(self) -> None:
        place = self.directory
        for name in ("configs", "docker", "trtspec"):
            (place / name).symlink_to(ROOT / name)
        shutil.copytree(NANO, place / "target")
        shutil.copytree(HEAD, place / "shipped")
        shutil.copytree(HEAD, place / "converted")
        self.urls["plain"] = self.serve([])
        self.urls["long"] = self.serve(["--head", str(HEAD), "--draft-len", "6"])
        self.count_anew()
        self.made("quantize", "target", "-o", "nvfp4")
        questions = (NANO / "prompts_heldout.jsonl").read_text().splitlines()[:12]
        for name in ("prompts.jsonl", "questions.jsonl", "requests.jsonl"):
            (place / name).write_text("\n".join(questions[:6]) + "\n")
        answer = {
            "role": "assistant",
            "content": "def double(number):\n    return 2 * number\n" * 3,
        }
        rows = [
            json.dumps({"messages": [*json.loads(row)["messages"], answer]}) for row in questions
        ]
        for name in ("answers", "math", "code", "stem", "chat", "german", "old", "held"):
            (place / f"{name}.jsonl").write_text(
                "\n".join(rows[6:] if name == "held" else rows[:6]) + "\n"
            )
        texts = [json.dumps({"text": f"Text number {n} of a few. " * 8}) for n in range(4)]
        (place / "texts.jsonl").write_text("\n".join(texts) + "\n")
        config = (
            "build-config",
            PUBLISHED,
            "--head",
            PUBLISHED_HEAD,
            "-o",
            "extra-llm-api-config.yml",
        )
        self.made(*config)
        shutil.copy(place / "extra-llm-api-config.yml", place / "file.yml")
        self.made(
            "build-config", "target", "--head", "shipped", "-o", "nano.yml", "--max-seq-len", "1024"
        )
        for name in ("last-week", "week-1", "week-2", "week-3", "week-4"):
            questions = [] if name == "last-week" else ["--dataset", "prompts.jsonl"]
            self.made("bench", self.urls["eagle"], *questions, *BENCH, "-o", name)

    def count_anew(self) -> None:
        """A speculating server that counted nothing yet: `watch` judges all that one counted."""
        self.urls["eagle"] = self.serve(["--head", str(HEAD), "--draft-len", "3"])

    def made(self, *words: str) -> None:
        succeeded(*words, HF_HUB_OFFLINE="1")

    def serve(self, options: list[str]) -> str:
        port = free_port()
        words = (*TRTSPEC, "serve", NANO, "--backend", "reference", "--port", port, *options)
        return self.servers.enter_context(served(port, *words))[0]

    def url(self, found: re.Match[str]) -> str:
        host, port = found[1], found[2]
        kind = (
            "plain"
            if host in PLAIN_HOSTS or port == "8001" or found.string.startswith("0=")
            else "eagle"
        )
        return self.urls["long" if found.string.startswith("6=") else kind]


@pytest.fixture(scope="module")
def room(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Room]:
    made, before = Room(tmp_path_factory.mktemp("room")), Path.cwd()
    os.chdir(made.directory)
    try:
        made.furnish()
        made.furniture = set(os.listdir())
        yield made
    finally:
        os.chdir(before)
        made.servers.close()


def stood_in(room: Room, words: list[str]) -> list[str]:
    """The command with stand-ins for what it names, in sizes of this machine."""
    verb = words[0]
    published = verb in ("lint", "build-config", "serve") and "reference" not in words
    names = PUBLISHED_NAMES if published else STAND_INS
    made, skip = [], False
    for before, word in zip(["", *words], words, strict=False):
        if skip or word == "--split":  # of a hub data set
            skip = word == "--split"
            continue
        word = re.sub(r"http://([\w.]+):(\d+)", room.url, word)
        word = EASIER.get(before) or OTHER_VALUES.get(word, word)
        word = "shipped" if word == "head" and verb in ("inspect", "convert") else word
        made.append(names.get(word, word))
    given = SMALLER.get(verb, [])
    if "baseline" in words:  # for watch: 200 steps of one category
        given = []
    if "--epochs" in made:
        given = ["--epochs", "1", *given[2:]]
    if verb == "synthesize" and "--base-url" not in made:
        given = [*given, "--base-url", f"{room.urls['plain']}/v1"]
    if verb == "serve" and "reference" in made:
        made = ["nano.yml" if word == "extra-llm-api-config.yml" else word for word in made]
    at = made.index("--") if "--" in made else len(made)
    if verb == "train" and "--dry-run" in made or verb == "check" and "--score" in made:
        given = []
    if verb in ("serve", "prove") and "--dry-run" not in made:
        given = ["--dry-run"]
    writes = verb != "prove" and {"-o", "--output", "--record"} & set(made)
    if writes and "--force" not in made:
        given = [*given, "--force"]
    return [*made[:at], *given, *made[at:]]


def as_written(room: Room, command: Command) -> list[str] | None:
    """The command's words with this room's addresses; None without output or with a stand-in."""
    words = [re.sub(r"http://([\w.]+):(\d+)", room.url, word) for word in command.words[1:]]
    if (
        not command.shown
        or {*STAND_INS, *EASIER, *OTHER_VALUES} & set(words)
        or PLACEHOLDER.search(" ".join(words))
    ):
        return None
    writes = words[0] != "prove" and {"-o", "--output", "--record"} & set(words)
    return [*words, *(["--force"] if writes else [])]


def without_figures(line: str) -> str:
    """`line` without numbers, addresses and the dtype, which depends on the CPU's bfloat16."""
    line = re.sub(r"http://[\w.:]+", "URL", " ".join(line.split()))
    return re.sub(r"\d[\d,.]*", "0", re.sub(r"\b(bfloat16|float32)\b", "DTYPE", line))


def only_parsed(command: Command) -> bool:
    words = command.words
    if words[0] != "trtspec" or len(words) < 2 or "--help" in words:
        return False
    return not sizes_only(words[1:]) and (
        words[1] in PARSED or bool(PLACEHOLDER.search(" ".join(words[2:])))
    )


@pytest.mark.parametrize(
    "page",
    [page for page in PAGES if any(map(only_parsed, commands(page)))],
    ids=page_name,
)
def test_every_command_of_the_page_on_stand_ins(room: Room, page: Path) -> None:
    room.tidy()
    if page.name == "watch.md":
        room.count_anew()
    wrong = []
    for command in filter(only_parsed, commands(page)):
        why = next((why for part, why in ELSEWHERE.items() if part in command.text), None)
        if command.text in rehearsed(page) and not command.shown:
            continue
        if why:
            OUTCOMES["elsewhere"] += 1
            continue
        words = command.words[1:]
        captured = as_written(room, command)
        words = captured or stood_in(room, words[: words.index(">")] if ">" in words else words)
        done = trtspec(
            *words, HF_HUB_OFFLINE="1", **({"TRTSPEC_PROGRESS": "1"} if captured else {})
        )
        OUTCOMES[words[0]] += 1
        missing = not_printed(command, done, without_figures) if captured else []
        if done.status not in ((0, 3) if captured or words[0] == "check" else (0,)) or missing:
            wrong.append(
                f"{page.name}:{command.line}: {command.text}\n"
                f"    {' '.join(words)}\n"
                f"    {done.status}: {missing} {done.stderr[-700:]}{done.stdout[-500:]}"
            )
            print("WRONG", wrong[-1], flush=True)
    assert not wrong, "\n".join(wrong)


REHEARSALS = sorted({block.page for block in blocks("sh")})
HELM = """
import sys
from tests.test_docs_commands import rendered
files = rendered(["helm", *sys.argv[1:]])
print(*(text for name, text in files.items() if name.endswith(".yaml")), sep="\\n---\\n")
"""


def test_the_tutorials_have_rehearsals() -> None:
    """The gate in CI is rehearsed by its own steps, in tests/bench/test_reference.py."""
    tutorials = {
        "README",
        "first-endpoint",
        "fine-tuned-kimi",
        "train-your-own-head",
        "deploy-kubernetes",
    }
    assert {page.stem for page in REHEARSALS} == tutorials


@pytest.mark.parametrize("page", REHEARSALS, ids=page_name)
def test_the_rehearsal_of_the_page(
    page: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its `sh` blocks as they are, one script; the page shows the last line that they print."""
    script = rehearsed(page)
    ports = {port: str(free_port()) for port in re.findall(r"--port (\d+)", script)}
    script = re.sub(r"\b\d+\b", lambda found: ports.get(found[0], found[0]), script)
    script = re.sub(r"(?<=--wait-ready )\d+", "900", script)
    program(tmp_path / "trtspec", f'exec "{sys.executable}" -m trtspec "$@"')
    program(tmp_path / "helm", f'exec "{sys.executable}" -c \'{HELM}\' "$@"')
    for name in ("docker", "trtspec/data"):
        (tmp_path / "clone" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "clone" / name).symlink_to(ROOT / name)
    path = (str(tmp_path), str(Path(sys.executable).parent), os.environ["PATH"])
    env = {**os.environ, "PATH": os.pathsep.join(path), "PYTHONPATH": str(ROOT)}
    began = time.monotonic()
    script = f"set -e\ntrap 'kill $(jobs -p) || true' EXIT\n{script}"
    last = printed("bash", "-c", script, env=env, cwd=tmp_path / "clone").splitlines()[-1]
    with capsys.disabled():
        print(f"\n{page_name(page)}: {time.monotonic() - began:.0f} s; {last}")
    assert last in page.read_text()


def test_the_pages_were_run() -> None:
    """After the pages: how many of their commands ran, and that few are left out."""
    ran = sum(OUTCOMES.values()) - OUTCOMES["elsewhere"]
    print(f"\ncommands run on stand-ins: {ran}: {dict(OUTCOMES)}")
    if len(OUTCOMES) > 10:  # all pages ran in this process
        assert ran >= 78 and OUTCOMES["elsewhere"] <= 11
