"""The Python API as a notebook uses it: every verb in a fresh process, after all imports."""

import inspect
import os
import sys
from importlib import metadata
from pathlib import Path

import pytest

import trtspec
from tests.command_line import Done, printed, ran
from tests.tiny import make_head, make_target
from trtspec import COMMANDS, lint
from trtspec.records import fields_of

ROOT = Path(__file__).parent.parent
TARGET, HEAD = "nvidia/Kimi-K2.5-NVFP4", "lightseekorg/kimi-k2.5-eagle3"

EVERYTHING = """
import importlib, pkgutil, sys
from pathlib import Path
import trtspec
for room in [module.name for module in pkgutil.iter_modules(trtspec.__path__) \
if module.name != "__main__"]:
    importlib.import_module(f"trtspec.{room}")
for verb in ("inspect", "lint", "build_config", "plan", "quantize", "convert", "train", "Engine"):
    assert callable(getattr(trtspec, verb)), verb

target, head, out = sys.argv[1:]
whole = trtspec.inspect(target)
assert whole.ok and (whole["kind"], whole["format"]) == ("target", "bf16") \
and whole["parameters"] > 100_000
assert trtspec.inspect(Path(head), against=Path(target))["attention"] == "mha"

made = trtspec.quantize(target, Path(out) / "nvfp4", policy="k2.5")
assert made["quantized"] > 0 and trtspec.inspect(made["output"], against=target, sample=0).ok
assert trtspec.quantize(target, out + "/other", dry_run=True)["dry_run"]

done = trtspec.convert(head, out + "/vllm", "vllm")
assert done.ok and (Path(done["output"]) / "config.json").is_file()

try:
    trtspec.convert(head, out + "/vllm", "vllm")
except trtspec.TrtspecError as error:
    assert (error.code, error.exit_code) == ("TS-ERROR-USAGE", 2) and "`force`" in error.remedy
else:
    raise SystemExit("an output was overwritten")

from trtspec.engine.request import GenerationRequest
from trtspec.models.weights import load_target
engine = trtspec.Engine(load_target(target))
answer = engine.generate([GenerationRequest("a", [5, 6, 7], 4)])["a"]
assert len(answer.token_ids) == 4
"""

LIGHT = f"""
import sys
import trtspec
assert not [name for name in sys.modules if name.startswith("trtspec.")], \
"import trtspec loads nothing else"

written = trtspec.build_config("{TARGET}", head="{HEAD}", trtllm_version="1.3.0rc20", \
isl=1024, osl=1024)
assert written["config"]["speculative_config"]["max_draft_len"] == 3 \
and "--tp_size" in written["argv"]

for form in (written["text"], written["config"]):
    judged = trtspec.lint(form, trtllm_version="1.3.0rc20", target="{TARGET}", head="{HEAD}")
    assert judged.ok and judged["version"] == "1.3.0rc20", judged
path = sys.argv[1] + "/engine.yml"
open(path, "w").write("max_batchsize: 8\\n")
judged = trtspec.lint(path, trtllm_version="1.3.0rc20")
assert not judged.ok and judged.problems[0].where.startswith(path), judged
assert not trtspec.lint({{"max_batchsize": 8}}, trtllm_version="1.3.0rc20").ok
assert trtspec.lint({{"max-num-seqs": 8}})["version_reason"].startswith("vLLM")

decision = trtspec.plan("{TARGET}", head="{HEAD}", concurrency=[1, 16], acceptance="2.6@3")
assert decision["fits"] and decision["best"]["concurrency"] in (1, 16)
assert len(repr(decision)) < 400
assert trtspec.inspect("{TARGET}")["format"] == "nvfp4"
assert not trtspec.plan("{TARGET}", gpus=1).ok and trtspec.explain("TS-PAIR-WIDTH")["remedy"]
for wrong in (lambda: trtspec.plan("{TARGET}", gpu="b999"), \
lambda: trtspec.lint("no-such-file.yml"),
              lambda: trtspec.build_config("{TARGET}", draft_len=5), \
lambda: trtspec.inspect("nobody/nothing"),
              lambda: trtspec.plan("{TARGET}", tp_size=0), \
lambda: trtspec.build_config("{TARGET}", goal="speed")):
    try:
        wrong()
    except trtspec.TrtspecError as error:
        assert "--" not in error.message, error.message
        continue
    raise SystemExit("no error")
assert not {{"torch", "transformers", "modelopt"}} & set(sys.modules)
"""


MYPY = """
[mypy]
strict = true
ignore_missing_imports = true
follow_imports = silent
[mypy-torch.*,transformers.*,numpy.*]
follow_imports = skip
"""


def notebook(script: str, *words: object) -> Done:
    return ran(sys.executable, "-c", script, *words, cwd=ROOT, timeout=900)


def test_every_verb_after_every_room(tmp_path: Path) -> None:
    target = make_target(tmp_path / "target", layers=7)
    head = make_head(tmp_path / "head", target, draft_vocab=128)
    done = notebook(EVERYTHING, target, head, tmp_path)
    assert (done.status, done.stdout) == (0, ""), done


def test_the_torch_free_verbs_load_no_torch_and_print_nothing(tmp_path: Path) -> None:
    assert notebook(LIGHT, tmp_path) == Done(0, "", "")


def test_the_names_of_the_package_are_those_of_the_api_and_none_is_a_module() -> None:
    assert set(trtspec.__all__) == {
        *COMMANDS,
        "lint",
        "Engine",
        "Result",
        "TrtspecError",
        "__version__",
    }
    assert trtspec.__version__ == metadata.version("trtspec") and callable(lint)
    assert not {path.stem for path in (ROOT / "trtspec").iterdir()} & set(trtspec.__all__)
    assert set(trtspec.__all__) <= set(dir(trtspec))
    with pytest.raises(AttributeError):
        trtspec.no_such_verb  # noqa: B018


def test_the_package_is_typed() -> None:
    assert (ROOT / "trtspec" / "py.typed").is_file()


@pytest.mark.parametrize("verb", COMMANDS)
def test_a_verb_has_the_options_of_its_command_with_their_defaults(verb: str) -> None:
    from tests.cli.test_matrix import record_of

    parameters = inspect.signature(getattr(trtspec, verb)).parameters
    declared = {
        field.keyword: field.default
        for field in fields_of(record_of(verb.replace("_", "-"))).values()
    }
    assert set(parameters) == set(declared) - {"json_"}
    for name, parameter in parameters.items():
        if parameter.default is not inspect.Parameter.empty:
            assert parameter.default == declared[name], name


def test_the_documented_examples_pass_mypy_strict(tmp_path: Path) -> None:
    text = (ROOT / "docs" / "python-api.md").read_text(encoding="utf-8")
    for number, block in enumerate(text.split("```python\n")[1:]):
        (tmp_path / f"example_{number}.py").write_text(block.partition("```")[0])
    (tmp_path / "mypy.ini").write_text(MYPY)
    environment = os.environ | {"MYPYPATH": str(ROOT)}
    printed(sys.executable, "-m", "mypy", tmp_path, env=environment, cwd=tmp_path)


def test_the_documented_example_runs() -> None:
    text = (ROOT / "docs" / "python-api.md").read_text(encoding="utf-8")
    done = notebook(text.partition("```python\n")[2].partition("```")[0])
    assert done.status == 0, done
