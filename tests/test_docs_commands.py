"""Every command of README and docs/.

It is run where nothing but this machine is needed, dry-run where it would launch, and otherwise
compared with what takes it: the options of the command, the values of the chart, the files that it
names.

A page is read from top to bottom in one directory, so that a command finds what an earlier one
wrote. A `text` block directly below commands is the captured output of the last of them: each of
its lines must be printed, with `...` for anything in a line, and a line `...` for any lines.
"""

import os
import re
import shlex
import shutil
import subprocess
from collections import Counter
from collections.abc import Callable
from importlib import import_module
from pathlib import Path

import pytest
import yaml

from tests.command_line import Done, succeeded, trtspec
from tools.pages import PAGES, ROOT, Command, blocks, commands
from trtspec.records import parse, record_of

# of a user's own machine: an endpoint, files or hours that a test does not have. Their options are
# parsed.
PARSED = {
    "bench",
    "check",
    "watch",
    "synthesize",
    "calibrate",
    "train",
    "quantize",
    "convert",
    "demo",
    "doctor",
    "inspect",
    "prove",
}
PLACEHOLDER = re.compile(r"(?<![\w.#-])[A-Z]{3,}(?![\w-])|\.\.\.|\[|<[a-z]")


def not_printed(command: Command, done: Done, same: Callable[[str], str] = str.rstrip) -> list[str]:
    """Lines that the page shows and the command did not print, both seen through `same`."""
    printed = [same(line) for line in (done.stdout + "\n" + done.stderr).splitlines()]
    missing = []
    for line in command.shown:
        pattern = ".*".join(re.escape(same(part)) for part in line.rstrip().split("..."))
        if not any(re.fullmatch(pattern, one) for one in printed):
            missing.append(line)
    return missing


def options_exist(command: Command) -> str:
    words = [word for word in command.words if word not in ("|", "&&")]
    name = words[1].replace("-", "_")
    parse(record_of(getattr(import_module(f"trtspec.cli.{name}"), name)), words[2:], words[1])
    return "options parsed"


def sizes_only(words: list[str]) -> bool:
    """Of `train`, from the sizes in its configuration alone: needs neither weights nor data."""
    return words[0] == "train" and {"--dry-run", "--gpu"} <= set(words)


def rehearsed(page: Path) -> str:
    """The blocks that tests/test_docs_run.py runs as one script."""
    return "".join(block.text for block in blocks("sh") if block.page == page)


def run_trtspec(command: Command, script: str) -> str:
    """Runs what writes or judges configurations, with `serve` as a dry run; parses the rest."""
    words = command.words[1:]
    if not words or words[0].startswith("-"):
        succeeded(*words)
        return "run"
    if ">" in words:
        words = words[: words.index(">")]
    complete = Command(command.line, shlex.join(["trtspec", *words]))
    sizes = sizes_only(words)
    parsed = command.text in script
    parsed |= words[0] in PARSED and not sizes and not {"prove", "--dry-run"} <= set(words)
    if parsed or PLACEHOLDER.search(" ".join(words[1:])) or "--help" in words or "|" in words:
        return options_exist(complete) if "--help" not in words else "options parsed"
    files = [
        word for word in words[1:] if re.search(r"\.(ya?ml|jsonl?)$", word) and "=" not in word
    ]
    writes = {words[words.index(flag) + 1] for flag in ("-o", "--output") if flag in words}
    files += (
        [words[words.index("--head") + 1]] if "--head" in words else []
    )  # a directory of the reader's
    absent = [file for file in files if file not in writes and not re.match(r"\w[\w-]+/\w", file)]
    if (not sizes and any(not Path(file).exists() for file in absent)) or "--installed" in words:
        return options_exist(complete)
    words[1:1] = ["--dry-run"] if words[0] == "serve" and "--dry-run" not in words else []
    words += ["--force"] if words[0] == "build-config" and writes and "--force" not in words else []
    done = trtspec(
        *words, HF_HUB_OFFLINE="1", **({"TRTSPEC_PROGRESS": "1"} if command.shown else {})
    )
    assert done.status in ((0, 3) if command.shown else (0,)), done
    assert not (missing := not_printed(command, done)), (
        f"not printed: {missing}\n{done.stdout}{done.stderr}"
    )
    return "dry-run" if "--dry-run" in words else "run"


def run_helm(command: Command) -> str:
    words = command.words
    if words[1] not in ("install", "upgrade", "template"):
        return "named"
    assert any("kind: " in text for text in rendered(words).values())
    return "rendered"


def rendered(words: list[str]) -> dict[str, str]:
    """The chart with the words' files and values; an upgrade keeps none of the ones before."""
    helm = pytest.importorskip("helm_python")
    from tests.docker.chart import merged

    chart = ROOT / words[3]
    values: dict = {}
    for flag, word in zip(words[4:], words[5:], strict=False):
        if flag in ("-f", "--values"):
            values = merged(values, yaml.safe_load(Path(word).read_text()))
        if flag == "--set":
            key, _, text = word.partition("=")
            value = text if key.endswith(".tag") else yaml.safe_load(text)
            for part in reversed(key.split(".")):
                value = {part: value}
            values = merged(values, value)
    return helm.Chart.load(str(chart)).render(values, name=words[2], namespace="serving")


def run_docker(command: Command) -> str:
    words = command.words
    if words[1:2] == ["build"]:
        dockerfile = (ROOT / words[words.index("-f") + 1]).read_text()
        given = [
            after.partition("=")[0]
            for word, after in zip(words, words[1:], strict=False)
            if word == "--build-arg"
        ]
        assert all(re.search(rf"^ARG {name}\b", dockerfile, re.MULTILINE) for name in given)
        return "checked"
    if words[1:2] == ["compose"]:
        text = (ROOT / words[words.index("-f") + 1]).read_text()
        variables = set(re.findall(r"\$\{(\w+)\}", text))
        if "--env-file" in words:
            lines = (ROOT / words[words.index("--env-file") + 1]).read_text().splitlines()
            given = dict(line.split("=", 1) for line in lines)
            assert (
                variables <= given.keys()
                and (ROOT / "configs" / f"{given['RECIPE']}.yml").is_file()
            )
        else:
            assert not variables
        services = yaml.safe_load(text)["services"]
        assert words[-1] in services or words[-1] in ("up", "--build")
        return "checked"
    return "named"


def run_one(command: Command, script: str) -> str:
    program = command.words[0]
    if program == "trtspec":
        return run_trtspec(command, script)
    if program == "helm" and "|" not in command.words:
        return run_helm(command)
    if program == "docker":
        return run_docker(command)
    if program == "make":
        targets = [word for word in command.words[1:] if "=" not in word]
        makefile = (ROOT / "Makefile").read_text()
        assert all(
            re.search(rf"^{re.escape(target)}:", makefile, re.MULTILINE) for target in targets
        )
        return "checked"
    subprocess.run(["bash", "-n", "-c", command.text], check=True)
    return "named"


OUTCOMES: Counter[str] = Counter()


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_command_of_the_page(
    page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("configs", "docker", "trtspec"):
        (tmp_path / name).symlink_to(ROOT / name)
    (tmp_path / "servers").mkdir()
    monkeypatch.chdir(tmp_path)
    for name in list(os.environ):
        if name.startswith("TRTSPEC_") and name != "TRTSPEC_UPSTREAM_DATA":
            monkeypatch.delenv(name)
    wrong = []
    for command in commands(page):
        try:
            OUTCOMES[run_one(command, rehearsed(page))] += 1
        except Exception as error:
            wrong.append(
                f"{page.name}:{command.line}: {command.text}\n    {type(error).__name__}: {error}"
            )
    assert not wrong, "\n".join(wrong)


def test_the_pages_have_commands() -> None:
    """After the pages: what became of their commands."""
    print(f"\n{sum(OUTCOMES.values())} commands on {len(PAGES)} pages: {dict(OUTCOMES)}")
    if len(OUTCOMES) > 1:  # all pages ran in this process
        assert OUTCOMES["run"] > 15 and OUTCOMES["dry-run"] > 10 and OUTCOMES["rendered"] >= 3


def test_the_page_of_hardware_leaves_little_unrun() -> None:
    """What it prints is run, dry-run or parsed; none of its commands has a placeholder."""
    found = [one for one in commands(ROOT / "docs" / "hardware.md") if one.words[0] == "trtspec"]
    assert len(found) >= 15 and not [one.text for one in found if PLACEHOLDER.search(one.text)]


def test_the_readme_never_installs_into_the_engines_environment() -> None:
    """Every pip install is into an environment of its own, or of the reader's.

    README, docs and images have them.
    """
    for dockerfile in (ROOT / "docker").glob("*.Dockerfile"):
        for line in re.findall(r".*\bpip install\b.*", dockerfile.read_text()):
            assert re.search(
                r"(/opt/trtspec/bin/|/sbom/bin/|/tmp/sbom/bin/)pip|^RUN pip install", line
            ), line
    assert "python3 -m venv" in (ROOT / "docs/hardware.md").read_text()
    assert shutil.which("bash")
