"""Code that a checkpoint brings: what is listed, what is trusted, and what is refused by name."""

import hashlib
import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.command_line import inspected, succeeded, trtspec
from tests.json_files import read_json, write_json
from tests.tiny import make_head, make_target
from trtspec.checkpoint.hub import resolve
from trtspec.checkpoint.remote_code import read_code
from trtspec.data_files import kimi_nano_dir
from trtspec.launch.serve_options import ServeOptions
from trtspec.verbs.serve import plan_engine
from trtspec.vllm import plan_vllm

CODE = "print('ran')\n"
SHA256 = hashlib.sha256(CODE.encode()).hexdigest()
REFERENCE, PLAIN, REPOSITORY = "TS-CODE-REFERENCE", "TS-NAME-NOT-PLAIN", "TS-CODE-REPOSITORY"
HOSTILE: list[tuple[Any, str]] = [
    ("../evil.Class", REFERENCE),
    ("..evil.Class", REFERENCE),
    ("evil", REFERENCE),
    ("", REFERENCE),
    (".Class", REFERENCE),
    ("evil.", REFERENCE),
    ("package.evil.Class", REFERENCE),
    ("evil.Class\x1b[2J", REFERENCE),
    (7, REFERENCE),
    (True, REFERENCE),
    ({"deeper": 1.5}, REFERENCE),
    ("/etc/evil.Class", PLAIN),
    ("folder/evil.Class", PLAIN),
    ("folder\\evil.Class", PLAIN),
    ("evil\0.Class", PLAIN),
    ("evil\n.Class", PLAIN),
    ("evil\x1b]52;c;AAAA\x07.Class", PLAIN),
    (f"{'x' * 300}.Class", PLAIN),
    ("org/repository--evil.Class", REPOSITORY),
    ("/etc--evil.Class", REPOSITORY),
    (["org/repository--evil.Class", None], REPOSITORY),
    ("absent.Class", "TS-CODE-ABSENT"),
    ([None, "absent.Class"], "TS-CODE-ABSENT"),
]
FILES = (
    "config.json", "tokenizer_config.json", "processor_config.json", "preprocessor_config.json",
    "video_preprocessor_config.json", "generation_config.json", "config.4.0.0.json",
)  # fmt: skip


@pytest.fixture
def out(tmp_path: Path) -> Path:
    return tmp_path / "out"


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A target and a head without code."""
    target = make_target(tmp_path_factory.mktemp("target"), layers=8)
    return target, make_head(tmp_path_factory.mktemp("head"), target)


@pytest.fixture
def target(models: tuple[Path, Path], tmp_path: Path) -> Path:
    return shutil.copytree(models[0], tmp_path / "target")


@pytest.fixture
def head(models: tuple[Path, Path], tmp_path: Path) -> Path:
    return shutil.copytree(models[1], tmp_path / "head")


@pytest.fixture(params=["target", "head"])
def checkpoint(request: pytest.FixtureRequest) -> Any:
    return request.getfixturevalue(request.param)


def write(path: Path, value: Any, *keys: str) -> None:
    """Puts a value behind keys of a JSON file, which is made where there is none."""
    config = read_json(path) if path.exists() else {}
    inner = config
    for key in keys[:-1]:
        inner = inner.setdefault(key, {})
    inner[keys[-1]] = value
    write_json(path, config)


def bring_code(checkpoint: Path, file: str = "config.json") -> None:
    write(checkpoint / file, {"AutoConfig": "configuration_new.Config"}, "auto_map")
    (checkpoint / "configuration_new.py").write_text(CODE)
    (checkpoint / "imported.py").write_text(CODE)


def found(checkpoint: Path) -> dict[str, str]:
    return {
        problem.where: problem.code
        for problem in inspected(checkpoint).problems
        if problem.severity == "error"
    }


def test_inspect_names_each_hostile_reference(checkpoint: Path) -> None:
    write(checkpoint / "config.json", [value for value, _ in HOSTILE], "auto_map")
    problems = inspected(checkpoint).problems
    codes = {int(where.split(":")[2]): code for where, code in found(checkpoint).items()}
    # the two references to one absent file are one problem
    assert codes == {index: code for index, (_, code) in enumerate(HOSTILE[:-1])}
    assert all(problem.message.isprintable() for problem in problems)


@pytest.mark.parametrize("backend", ["trtllm", "vllm", "reference"])
@pytest.mark.parametrize("value", ["/etc/evil.Class", "org/x--evil.Class", "absent.Class", 7])
def test_serve_refuses_a_hostile_reference(
    checkpoint: Path, backend: str, value: Any, target: Path, head: Path
) -> None:
    code = dict(row for row in HOSTILE if isinstance(row[0], str | int)).get(value, REPOSITORY)
    write(checkpoint / "tokenizer_config.json", value, "auto_map", "A")
    answer = trtspec("serve", target, "--head", head, "--backend", backend, "--dry-run", "--json")
    assert answer.status in (1, 3)
    assert code in answer.stdout and "tokenizer_config.json:auto_map:A" in answer.stdout
    assert "Traceback" not in answer.stderr and "unexpected" not in answer.stdout


@pytest.mark.parametrize("file", FILES)
def test_every_configuration_file_is_read(file: str, target: Path) -> None:
    write(target / file, "org/x--evil.Class", "text_config", "auto_map", "AutoModel")
    assert found(target) == {f"{file}:text_config:auto_map:AutoModel": REPOSITORY}
    assert inspected(target)["remote_code"] is True


@pytest.mark.parametrize("value", [None, {}, {"AutoConfig": None}, [None, None]])
def test_a_null_refers_to_nothing(value: Any, target: Path) -> None:
    write(target / "config.json", value, "auto_map")
    assert not found(target) and inspected(target)["remote_code"] is False


def test_code_is_listed_with_its_hash(checkpoint: Path) -> None:
    write(checkpoint / "tokenizer_config.json", ["configuration_new.Slow", None], "auto_map")
    bring_code(checkpoint)
    report = inspected(checkpoint)
    assert report.ok and report["remote_code"] is True
    assert report["code_files"] == dict.fromkeys(["configuration_new.py", "imported.py"], SHA256)
    assert f".py  {SHA256}" in trtspec("inspect", checkpoint).stdout
    codes = {problem.code for problem in report.problems}
    assert ("TS-HEAD-CODE" in codes) == (checkpoint.name == "head")


@pytest.mark.parametrize("plan", [plan_engine, plan_vllm])
def test_a_launch_with_code_that_nobody_trusts_is_refused(
    checkpoint: Path, plan: Any, target: Path, head: Path
) -> None:
    bring_code(checkpoint)
    for trusted in (False, True):
        options = ServeOptions(target=str(target), head=str(head), trust_remote_code=trusted)
        problems = plan(options, launching=True).problems
        refusals = [problem for problem in problems if problem.code == "TS-SERVE-REMOTE-CODE"]
        assert [(problem.severity, problem.where) for problem in refusals] == (
            [] if trusted else [("error", str(checkpoint))]
        )
        for problem in refusals:
            assert f"configuration_new.py sha256:{SHA256}; imported.py sha256:" in problem.message


@pytest.mark.parametrize(
    ("link", "codes"),
    [
        ("../secret.py", {"TS-CODE-LINK"}),
        ("imported.py", set()),
        ("gone.py", {"TS-CODE-ABSENT"}),
    ],
)
def test_a_link_must_stay_in_the_checkpoint(target: Path, link: str, codes: set[str]) -> None:
    bring_code(target)
    (target.parent / "secret.py").write_text(CODE)
    (target / "configuration_new.py").unlink()
    (target / "configuration_new.py").symlink_to(link)
    assert set(found(target).values()) == codes


def test_links_of_the_hub_cache_are_its_own(target: Path, tmp_path: Path) -> None:
    bring_code(target)
    snapshot = shutil.copytree(target, tmp_path / "models--org--name" / "snapshots" / "main")
    blobs = tmp_path / "models--org--name" / "blobs"
    blobs.mkdir()
    (snapshot / "configuration_new.py").rename(blobs / SHA256)
    (snapshot / "configuration_new.py").symlink_to(f"../../blobs/{SHA256}")
    assert not found(snapshot)
    assert inspected(snapshot)["code_files"]["configuration_new.py"] == SHA256


@pytest.mark.parametrize("value", ["org/x--evil.Class", "/evil.Class", "absent.Class", "evil", 7])
def test_a_converted_head_has_no_code(value: Any, head: Path, out: Path) -> None:
    bring_code(head)
    write(head / "config.json", value, "auto_map", "AutoModel")
    write(head / "config.json", value, "more", "auto_map", "AutoModel")
    answer = succeeded("convert", head, "-o", out, "--to", "vllm")
    assert "repaired: config.json:auto_map:AutoConfig: the head brings code" in answer.stdout
    assert "repaired: config.json:auto_map:AutoModel: " in answer.stdout
    assert "auto_map" not in (out / "config.json").read_text()
    assert not list(out.glob("*.py"))
    assert inspected(out)["remote_code"] is False


def test_a_quantized_target_brings_the_same_code(target: Path, out: Path) -> None:
    bring_code(target)
    succeeded("quantize", target, "-o", out, "--input-scales", "one")
    before, after = inspected(target), inspected(out)
    assert after["code_files"] == before["code_files"] and not found(out)


@pytest.mark.parametrize("place", ["", "text_config"])
def test_quantize_refuses_code_that_is_not_there(place: str, target: Path, out: Path) -> None:
    keys = [key for key in (place, "auto_map", "AutoModel") if key]
    write(target / "config.json", "absent.Class", *keys)
    answer = trtspec("quantize", target, "-o", out, "--dry-run", "--json")
    assert answer.status == 1 and "TS-CODE-ABSENT" in answer.stdout


def test_what_is_shipped_and_published() -> None:
    assert not read_code(kimi_nano_dir())
    code = resolve("moonshotai/Kimi-K2.5", weights=False).code()
    assert not code.problems and "configuration_kimi_k25.py" in code.listed()
