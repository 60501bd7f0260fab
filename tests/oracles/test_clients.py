"""Published clients, unmodified, against the reference server with kimi-nano and its head.

Each runs in the environment where it installs: TRTSPEC_LITELLM_PYTHON, TRTSPEC_LANGCHAIN_PYTHON,
TRTSPEC_LM_EVAL_PYTHON, TRTSPEC_GUIDELLM_PYTHON and TRTSPEC_AIPERF_PYTHON name their Pythons (`make
test-oracles` makes them); one that is not named is skipped. openai is in the project's own.
"""

import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.command_line import printed, printed_json
from tests.engine.conftest import Running, served
from tests.json_files import read_json
from trtspec.checkpoint.tokenizer import SPLIT_PATTERN, KimiTokenizer
from trtspec.data_files import DATA, kimi_nano_dir
from trtspec.models.k2 import KimiModel
from trtspec.models.weights import load_target

CLIENTS = Path(__file__).with_name("clients.py")
REQUESTS = 12
PAIRS = [
    ("def add(a, b):\n    return", " a + b"),
    ("def add(a, b):\n    return", " None"),
    ("import", " os"),
    ("class Test(unittest.TestCase):\n    def", " setUp(self):"),
    ("for i in", " range(10):"),
    ("The weather is", " \u2603 in Zürich"),
]
QUIET = {
    "HF_HUB_OFFLINE": "1",
    "HF_HUB_DISABLE_TELEMETRY": "1",
    "DO_NOT_TRACK": "1",
    "OPENAI_API_KEY": "none",
}

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    sizes = ("max_batch_size=16", "max_seq_len=1024", "max_queue=64")
    with served(kimi_nano_dir(), str(DATA / "kimi-nano-eagle3"), *sizes) as running:
        yield running


@pytest.fixture(scope="module")
def tokenizer_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """kimi-nano's tokenizer as transformers converts it, with equal ids.

    These clients do not read tiktoken.
    """
    from transformers import PreTrainedTokenizerFast
    from transformers.convert_slow_tokenizer import TikTokenConverter

    ours = KimiTokenizer(kimi_nano_dir())
    names = [name for name, _ in sorted(ours.special_tokens.items(), key=lambda pair: pair[1])]
    converter = TikTokenConverter(
        str(kimi_nano_dir() / "tiktoken.model"), pattern=SPLIT_PATTERN, extra_special_tokens=names
    )
    fast = PreTrainedTokenizerFast(
        tokenizer_object=converter.converted(), eos_token="[EOS]", bos_token="[BOS]"
    )
    for context, text in PAIRS:
        assert fast.encode(context + text) == ours.encode(context + text)
    place = tmp_path_factory.mktemp("tokenizer")
    fast.save_pretrained(place)
    return place


def python_of(name: str) -> str:
    variable = f"TRTSPEC_{name.upper()}_PYTHON"
    if not os.environ.get(variable):
        pytest.skip(f"{variable} names no Python")
    return str(Path(os.environ[variable]).absolute())


def environment() -> dict[str, str]:
    return {key: value for key, value in os.environ.items() if key != "PYTHONPATH"} | QUIET


def run(python: str, name: str, *arguments: str) -> Any:
    """What a client of clients.py printed."""
    return printed_json(python, CLIENTS, name, *arguments, env=environment(), timeout=900)


def right_call(name: str, arguments: str) -> bool:
    given = json.loads(arguments)
    return (
        name in ("get_weather", "get_news")
        and given["city"] in ("Paris", "Rome")
        and 0 <= given["days"] <= 9
    )


def command(python: str, name: str, folder: Path, *arguments: str, offline: str = "1") -> None:
    """Runs a command-line client that stands beside its Python."""
    words = [Path(python).with_name(name), *arguments]
    printed(*words, env=environment() | {"HF_HUB_OFFLINE": offline}, cwd=folder, timeout=1200)


@pytest.mark.parametrize("name", ["openai", "litellm", "langchain"])
def test_chat_streams_tools_and_structure(server: Running, name: str) -> None:
    found = run(sys.executable if name == "openai" else python_of(name), name, server.url)
    assert found["whole"] and set(found["same"]) == {found["whole"]}
    assert found["calls"] and all(right_call(*call) for call in found["calls"])
    if name == "openai":
        assert found["models"] == ["tiny-kimi"] and set(found["parsed"]) == {"city", "days"}
    if name == "langchain":
        assert all(set(value) == {"city", "days"} for value in found["structured"].values())


@torch.inference_mode()
def log_likelihood(target: KimiModel, context: list[int], text: list[int]) -> tuple[float, bool]:
    """Log-probability of `text` after `context`, and whether greedy decoding gives that text.

    The whole text goes through the model, without cache and engine.
    """
    logits = (
        target(torch.tensor([context + text]))
        .logits[0]
        .float()
        .log_softmax(-1)[len(context) - 1 : -1]
    )
    picked = logits.gather(1, torch.tensor(text).unsqueeze(1)).squeeze(1)
    return float(picked.sum()), logits.argmax(-1).tolist() == text


def test_lm_eval(server: Running, tokenizer_dir: Path) -> None:
    """Its log-likelihoods are those of the model; its generations are those of the server."""
    found = run(python_of("lm_eval"), "lm_eval", server.url, str(tokenizer_dir), json.dumps(PAIRS))
    target, tokenizer = (
        load_target(kimi_nano_dir(), dtype=torch.float32),
        KimiTokenizer(kimi_nano_dir()),
    )
    worst = 0.0
    for (context, text), (value, greedy) in zip(PAIRS, found["loglikelihoods"], strict=True):
        known = len(tokenizer.encode(context))
        ids = tokenizer.encode(context + text)
        expected, likeliest = log_likelihood(target, ids[:known], ids[known:])
        worst = max(worst, abs(value - expected))
        assert greedy == likeliest
    print(f"\n{len(PAIRS)} log-likelihoods of lm_eval, at most {worst:.1e} from the model's own")
    assert worst < 1e-3
    assert len(found["generations"]) == len(PAIRS) and found["chat"]


def test_guidellm(server: Running, tokenizer_dir: Path, tmp_path: Path) -> None:
    python, report = python_of("guidellm"), tmp_path / "report.json"
    options = {
        "backend": (
            f"openai_http,target={server.url},model=tiny-kimi,request_format=/v1/completions"
        ),
        "profile": "concurrent,streams=4",
        "constraint": f"max_requests,count={REQUESTS}",
        "data": "synthetic_text,prompt_tokens=32,output_tokens=16",
        "tokenizer": f"huggingface_auto,model={tokenizer_dir}",
        "output": f"json,path={report}",
    }
    words = [word for name, value in options.items() for word in (f"--{name}", f"kind={value}")]
    command(python, "guidellm", tmp_path, "run", *words, "--disable-console-interactive")
    (benchmark,) = read_json(report)["benchmarks"]
    totals = benchmark["metrics"]["request_totals"]
    print(f"\nguidellm: {totals}")
    assert totals["successful"] >= REQUESTS and not totals["errored"]


def test_aiperf(server: Running, tokenizer_dir: Path, tmp_path: Path) -> None:
    python = python_of("aiperf")
    counts = ["--request-count", str(REQUESTS), "--concurrency", "4", "--isl", "32", "--osl", "16"]
    place = [
        "--tokenizer",
        str(tokenizer_dir),
        "--artifact-dir",
        str(tmp_path / "found"),
        "--ui",
        "none",
    ]
    shape = ["--endpoint-type", "chat", "--streaming", "--url", server.url, "--model", "tiny-kimi"]
    # offline it looks for a tokenizer in the hub's cache only, not in a folder
    command(python, "aiperf", tmp_path, "profile", *shape, *counts, *place, offline="")
    (exported,) = (tmp_path / "found").rglob("profile_export_aiperf.json")
    found = read_json(exported)
    print(f"\naiperf: {found['request_count']}, {found['output_sequence_length']}")
    assert found["request_count"]["avg"] == REQUESTS and not found.get("error_summary")
