"""A real vLLM on this CPU, launched, asked and stopped by `trtspec serve --backend vllm`.

It gives the same tokens as the reference engine, in the same number of verification steps, and
leaves no process.

TRTSPEC_VLLM_PYTHON names a Python with vLLM (`make test-oracles` makes one); skipped without.
TRTSPEC_VLLM_STARTS is the number of starts and stops of the last test, 30 in `make test-oracles`;
TRTSPEC_VLLM_PROMPTS that of prompts, 60. What the CPU wheel lacks is in vllm_on_a_cpu.py. Steps are
compared, accepted drafts are not: vLLM counts drafts behind the end of an answer as accepted.
"""

import contextlib
import json
import os
import signal
import socket
import subprocess
import threading
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from tests.command_line import TRTSPEC, alive, free_port, printed, process, served, wait_for
from tests.engine.near_ties import first_divergence, quantized_rounding_at
from tests.json_files import read_json
from tests.oracles.vllm_environment import IN_VLLM, vllm_environment
from trtspec.bench.questions.datasets import load_dataset, spread
from trtspec.checkpoint.tokenizer import KimiTokenizer
from trtspec.client.servers import FROM_COUNTERS, Counters
from trtspec.data_files import DATA, kimi_nano_dir
from trtspec.engine.request import GenerationRequest
from trtspec.engine.sequence import Output
from trtspec.engine.server import ServerOptions, build_engine

PYTHON = os.environ.get("TRTSPEC_VLLM_PYTHON", "")
STARTS = int(os.environ.get("TRTSPEC_VLLM_STARTS", "3"))
ORACLES = Path(__file__).parent
NANO, HEAD = kimi_nano_dir(), DATA / "kimi-nano-eagle3"
PROMPTS = int(os.environ.get("TRTSPEC_VLLM_PROMPTS", "60"))
NEW_TOKENS, DRAFT_LEN, LENGTH, LONG = 64, 3, 1024, 4
READY, GONE = 900.0, 120.0  # seconds; a start takes 30 s of processor time
LOGPROBS = 1e-4  # float32: 1.9e-5 seen

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(3600),
    pytest.mark.skipif(not PYTHON, reason="TRTSPEC_VLLM_PYTHON names no Python with vLLM"),
]


@dataclass
class Launched:
    """A running `trtspec serve`, its messages so far, and every process seen below it."""

    process: subprocess.Popen[str]
    url: str
    said: list[str] = field(default_factory=list)
    below: set[int] = field(default_factory=set)

    def listen(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.said.append(line)

    def has_said(self, text: str) -> bool:
        return any(text in line for line in list(self.said))

    def wait_for(self, text: str) -> None:
        def said() -> bool:
            assert self.process.poll() is None, "".join(self.said[-60:])
            self.look()
            return self.has_said(text)

        wait_for(said, READY)

    def look(self) -> None:
        with contextlib.suppress(psutil.NoSuchProcess):
            self.below |= {
                child.pid for child in psutil.Process(self.process.pid).children(recursive=True)
            }

    def nothing_left(self) -> None:
        """Waits until no process that was below it is there.

        A zombie waits for its parent alone.
        """
        wait_for(lambda: not any(map(alive, self.below)), GONE)


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return vllm_environment(Path(PYTHON), tmp_path_factory.mktemp("plugin") / "vllm", os.environ)


def launched(
    environ: dict[str, str], target: Path, head: Path | None, dtype: str = "float32", **more: str
) -> Launched:
    port = free_port()
    words = [
        "serve",
        target,
        "--backend",
        "vllm",
        "--tp-size",
        "1",
        "--dtype",
        dtype,
        "--port",
        port,
    ]
    words += ["--max-seq-len", LENGTH, "--max-batch-size", 16, "--served-model-name", "nano"]
    words += [*(("--head", head, "--draft-len", DRAFT_LEN) if head else ()), *IN_VLLM]
    process = subprocess.Popen(
        [*TRTSPEC, *map(str, words)], env={**environ, **more}, text=True,
        stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, errors="replace",
    )  # fmt: skip
    server = Launched(process, f"http://localhost:{port}")
    threading.Thread(target=server.listen, daemon=True).start()
    return server


@contextlib.contextmanager
def serving(
    environment: dict[str, str], target: Path, head: Path | None, **variables: str
) -> Iterator[str]:
    """The URL of a ready vLLM, which is stopped by a signal behind it and leaves nothing."""
    server = launched(environment, target, head, **variables)
    try:
        server.wait_for("trtspec: ready on")
        yield server.url
        server.look()
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(timeout=GONE) == 0, "".join(server.said[-40:])
        assert server.has_said("trtspec: stopped as")
        server.nothing_left()
    finally:
        if server.process.poll() is None:
            server.process.kill()


@pytest.fixture(scope="module")
def prompts() -> list[GenerationRequest]:
    """Held-out prompts, and LONG documents of others, past the context where YaRN begins.

    There the head accepts a quarter to half of what it does on short prompts, and a wrong rope
    would look the same.
    """
    tokenizer = KimiTokenizer(NANO)
    lines = (NANO / "prompts_heldout.jsonl").read_text(encoding="utf-8").splitlines()
    asked = [json.loads(line)["messages"] for line in lines]
    texts = [messages[-1]["content"] for messages in asked[PROMPTS:]]
    # joined by spaces, no router chooses an expert by less than 2e-6: a tie of the router has two
    # right answers
    asked = asked[:PROMPTS] + [
        [{"role": "user", "content": " ".join(texts[n::LONG])[:2048]}] for n in range(LONG)
    ]
    ids = [tokenizer.encode_chat(messages)[1] for messages in asked]
    assert all(512 < len(prompt) <= LENGTH - NEW_TOKENS for prompt in ids[PROMPTS:])
    return [
        GenerationRequest(str(n), prompt, NEW_TOKENS, logprobs=5) for n, prompt in enumerate(ids)
    ]


def ask(url: str, prompts: list[GenerationRequest]) -> dict[str, Any]:
    """The first choice of every prompt, by its id, greedy."""

    def one(prompt: GenerationRequest) -> Any:
        body = {
            "model": "nano",
            "prompt": prompt.prompt_ids,
            "max_tokens": NEW_TOKENS,
            "temperature": 0,
            "logprobs": 5,
            "return_token_ids": True,
            "return_tokens_as_token_ids": True,
        }
        answer = httpx.post(f"{url}/v1/completions", json=body, timeout=READY)
        assert answer.status_code == 200, answer.text
        return answer.json()["choices"][0]

    with ThreadPoolExecutor(8) as pool:
        return {
            prompt.id: choice
            for prompt, choice in zip(prompts, pool.map(one, prompts), strict=True)
        }


def own_word(url: str) -> Counters:
    """vLLM's counters as they stand in its text, added up by this test alone."""
    found: Counter[str] = Counter()
    for line in httpx.get(f"{url}/metrics", timeout=60).text.splitlines():
        name, _, value = line.partition(" ")
        if line.startswith("vllm:spec_decode_num_"):
            found[name.partition("{")[0]] += float(value)
    steps, drafted, accepted = (
        int(found[f"vllm:spec_decode_num_{name}_total"])
        for name in ("drafts", "draft_tokens", "accepted_tokens")
    )
    return Counters(steps, drafted, accepted)


@dataclass
class Reference:
    """What the reference engine answers, its verification steps, and its target."""

    answers: dict[str, Output]
    steps: int
    target: Any


def reference(target: Path, head: Path | None, prompts: list[GenerationRequest]) -> Reference:
    options = ServerOptions(
        dtype="float32", draft_len=DRAFT_LEN, max_batch_size=16, max_seq_len=LENGTH
    )
    engine, _ = build_engine(target, head, options)
    engine.options = replace(engine.options, record_gaps=True)
    return Reference(engine.generate(prompts), engine.totals.steps, engine.target)


@pytest.fixture(scope="module")
def plain(prompts: list[GenerationRequest]) -> Reference:
    return reference(NANO, None, prompts)


def differing(found: dict[str, Any], wanted: dict[str, Output]) -> list[str]:
    return [name for name, answer in wanted.items() if found[name]["token_ids"] != answer.token_ids]


def largest_logprob_difference(found: dict[str, Any], wanted: dict[str, Output]) -> float:
    """Of the chosen tokens, over answers whose tokens agree."""
    return max(
        abs(theirs - ours.logprob)
        for name, answer in wanted.items()
        for theirs, ours in zip(
            found[name]["logprobs"]["token_logprobs"], answer.logprobs, strict=True
        )
    )


CHECK = ("--samples", 8, "--max-tokens", 64, "--context-tokens", 300, "--tokenizer", NANO)


def test_plain_answers_are_the_same(
    environment: dict[str, str], prompts: list[GenerationRequest], plain: Reference
) -> None:
    with serving(environment, NANO, None) as url:
        found = ask(url, prompts)
    assert not differing(found, plain.answers)
    worst = largest_logprob_difference(found, plain.answers)
    print(
        f"\nplain: {len(found)} of {len(found)} answers identical, "
        f"log-probabilities within {worst:.1e}"
    )
    assert worst < LOGPROBS


def made(*words: object, **environment: str) -> None:
    done = process(*words, **environment)
    assert done.status == 0, done


@pytest.mark.timeout(14400)
def test_honest_servers_pass_every_check(environment: dict[str, str], tmp_path: Path) -> None:
    """vLLM with the head passes TRTSPEC_HONEST_CHECKS (1) checks, scored by vLLM without it.

    Each check has its own questions.
    """
    head, lines = (
        tmp_path / "head",
        (Path(NANO) / "prompts_heldout.jsonl").read_text().splitlines(keepends=True),
    )
    checks = int(os.environ.get("TRTSPEC_HONEST_CHECKS", "1"))
    made("convert", HEAD, "-o", head, "--to", "vllm", "--target", NANO, **environment)
    recordings = [tmp_path / f"{number}.jsonl" for number in range(checks)]
    with serving(environment, NANO, head, dtype="bfloat16") as url:
        for number, recording in enumerate(recordings):
            questions = tmp_path / f"questions-{number}.jsonl"
            questions.write_text("".join(lines[number::checks]))
            done = process(
                "check", url, "--dataset", questions, *CHECK, "--record", recording, **environment
            )
            assert recording.is_file(), done
    with serving(environment, NANO, None, dtype="bfloat16") as url:
        for recording in recordings:
            done = process(
                "check", url, "--score", recording, "--tokenizer", NANO, "--json", **environment
            )
            verdict = done.json
            print(
                f"\n{recording.stem}: {verdict['message']}",
                *(row["why"] for row in verdict["results"]),
                sep="\n  ",
            )
            assert not [row for row in verdict["results"] if row["status"] == "fail"], verdict


BENCH_ASKS, BENCH_TOKENS = 8, 32
BENCH = (
    "--samples",
    BENCH_ASKS,
    "--max-tokens",
    BENCH_TOKENS,
    "--concurrency",
    1,
    "--temperature",
    0,
    "--warmup",
    0,
    "--thinking",
    "off",
)


def bench_tells_the_engines_counters(
    results: dict[str, Any], before: Counters, after: Counters
) -> None:
    """Each pass of bench takes the reference engine's steps; both add up to vLLM's counters.

    bench asks its questions once for the level and once more by category, greedily. vLLM counts
    drafts that it accepted past the end of answers; they are the surplus, which no token of an
    answer accounts for.
    """
    tokenizer = KimiTokenizer(NANO)
    chosen = spread(list(load_dataset("nano").questions), BENCH_ASKS)
    rendered = [tokenizer.encode_chat(*question.first_request())[1] for question in chosen]
    ours = reference(
        NANO, HEAD, [GenerationRequest(str(n), ids, BENCH_TOKENS) for n, ids in enumerate(rendered)]
    )
    received = sum(len(answer.token_ids) for answer in ours.answers.values())
    passes, told = (
        [results, *results["categories"].values()],
        results["concurrency"][0]["throughput"],
    )
    grown = Counters(
        after.steps - before.steps, after.drafted - before.drafted, after.accepted - before.accepted
    )
    print(
        f"\nbench: {results['steps']} steps, {results['tokens']} tokens, ours {ours.steps}, "
        f"{received}; counters grew by {grown}, surplus {[one['surplus'] for one in passes]}"
    )
    assert results["source"] == FROM_COUNTERS and told["errors"] == 0
    assert told["prompt_tokens"]["mean"] == pytest.approx(sum(map(len, rendered)) / BENCH_ASKS)
    assert (results["steps"], results["tokens"], results["turns"]) == (
        ours.steps,
        received,
        BENCH_ASKS,
    )
    for name in ("steps", "drafted"):
        assert sum(one[name] for one in passes) == getattr(grown, name), name
        assert sum(one[name] for one in passes[1:]) == results[name], name
    assert sum(one["accepted"] + one["surplus"] for one in passes) == grown.accepted
    for one in passes:
        assert one["accepted"] == one["tokens"] - one["turns"] - one["steps"], (
            "the accepted drafts that were received"
        )
        assert 0 <= one["surplus"] <= DRAFT_LEN * one["turns"], (
            "at most the drafts of each answer's last step"
        )
    assert results["acceptance_length"] == pytest.approx(
        1 + results["accepted"] / results["steps"], abs=1e-4
    )
    assert not [problem for problem in results["problems"] if problem["severity"] == "error"], (
        results["problems"]
    )


def test_the_shipped_latent_head_takes_as_many_steps(
    environment: dict[str, str], prompts: list[GenerationRequest], plain: Reference, tmp_path: Path
) -> None:
    converted = tmp_path / "head"
    made("convert", HEAD, "-o", converted, "--to", "vllm", "--target", NANO, **environment)
    ours = reference(NANO, HEAD, prompts)
    assert not [
        name for name, one in ours.answers.items() if one.token_ids != plain.answers[name].token_ids
    ]
    with serving(environment, NANO, converted) as url:
        found = ask(url, prompts)
        steps = own_word(url).steps
        before = own_word(url)
        measured = process("bench", url, *BENCH, "-o", tmp_path / "bench", **environment)
        after = own_word(url)
    print(
        f"\nMLA 3.1 head: {steps} steps, ours {ours.steps}; "
        f"differing {differing(found, ours.answers)}"
    )
    assert not differing(found, ours.answers) and steps == ours.steps
    assert measured.status == 0, measured
    bench_tells_the_engines_counters(read_json(tmp_path / "bench" / "results.json"), before, after)


@pytest.fixture(scope="module")
def pruned_head(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An MHA head of 1,024 of the 2,048 tokens, trained for a minute, in ModelOpt's layout."""
    from tests.engine.trained_heads import nano, trained
    from trtspec.heads.training.training_run import write_head

    spec, tensors = trained("mha", "3", True)
    place = tmp_path_factory.mktemp("heads") / "pruned"
    write_head(
        place, {name: value.contiguous() for name, value in tensors.items()}, spec, nano().spec
    )
    return place


@pytest.fixture(scope="module")
def pruned(prompts: list[GenerationRequest], pruned_head: Path) -> Reference:
    return reference(NANO, pruned_head, prompts)


@pytest.mark.parametrize("dialect", ["vllm", "speculators"])
def test_a_pruned_head_takes_as_many_steps(
    environment: dict[str, str], prompts: list[GenerationRequest], pruned_head: Path,
    pruned: Reference, tmp_path: Path, dialect: str,
) -> None:  # fmt: skip
    """vLLM takes the steps of the reference engine with a pruned head.

    vLLM drafts with its own attention, so the target's latent attention is off: it cannot mix the
    two on a CPU.
    """
    converted = tmp_path / "head"
    made("convert", pruned_head, "-o", converted, "--to", dialect, "--target", NANO, **environment)
    with serving(environment, NANO, converted, VLLM_MLA_DISABLE="1") as url:
        found, steps = ask(url, prompts), own_word(url).steps
    other = differing(found, pruned.answers)
    print(f"\npruned MHA head, {dialect}: {steps} steps, ours {pruned.steps}; differing {other}")
    assert not other and steps == pruned.steps


def test_nvfp4_differs_at_near_ties_only(
    environment: dict[str, str], prompts: list[GenerationRequest], tmp_path: Path
) -> None:
    """Quantized by the published policy of Kimi-K2.5; both round activations to NVFP4.

    Without its FP8 cache, which the plug-in's latent attention does not read.
    """
    target = tmp_path / "nvfp4"
    made("quantize", NANO, "-o", target, "--policy", "k2.5", "--kv-cache", "none", **environment)
    ours = reference(target, None, prompts)
    with serving(environment, target, None, TRTSPEC_ORACLE_NVFP4="1") as url:
        found = ask(url, prompts)
    names, gaps = differing(found, ours.answers), []
    for name in names:
        other = Output(name, found[name]["token_ids"], gaps=[0.0] * NEW_TOKENS)
        divergence = first_divergence(ours.answers[name], other)
        assert divergence is not None
        prompt = next(one.prompt_ids for one in prompts if one.id == name)
        rounding = quantized_rounding_at(ours.target, prompt, ours.answers[name], divergence)
        gaps.append(
            (name, divergence.index, divergence.gap, rounding, rounding.explains(divergence))
        )
    print(
        f"\nNVFP4: {len(prompts) - len(names)} of {len(prompts)} answers identical; "
        f"first divergences: {gaps}"
    )
    assert all(near for *_, near in gaps)


def test_vllm_bench_serve_measures_the_reference_server(
    environment: dict[str, str], tmp_path: Path
) -> None:
    port = free_port()
    options = ("--head", HEAD, "--port", port, "--served-model-name", "nano")
    program = Path(PYTHON).parent / "vllm"
    sizes = "--dataset-name random --random-input-len 32 --random-output-len 16 --num-prompts 8"
    with served(port, *TRTSPEC, "serve", NANO, "--backend", "reference", *options) as (url, server):
        for backend, path in (
            ("openai", "/v1/completions"),
            ("openai-chat", "/v1/chat/completions"),
        ):
            asked = (
                f"--backend {backend} --endpoint {path} --base-url {url} --model nano "
                f"--tokenizer {NANO}"
            )
            saved = f"--save-result --result-dir {tmp_path} --result-filename {backend}"
            words = f"bench serve {asked} {sizes} {saved}".split()
            printed(program, *words, env=environment, timeout=READY)
            result = read_json(tmp_path / backend)
            assert (result["completed"], result["failed"]) == (8, 0) and result[
                "total_output_tokens"
            ] > 0
    assert server.returncode == 0


@pytest.mark.parametrize("start", range(STARTS))
def test_a_start_and_stop_leaves_nothing(environment: dict[str, str], start: int) -> None:
    """A stop leaves no process: when ready, interrupted, killed outright, or while it loads.

    The four come in turn.
    """
    server = launched(environment, NANO, None)
    try:
        server.wait_for("loading weights" if start % 4 == 3 else "trtspec: ready on")
        assert len(server.below) >= 2, "vLLM's front end and its engine"
        number = (signal.SIGTERM, signal.SIGINT, signal.SIGKILL, signal.SIGTERM)[start % 4]
        server.process.send_signal(number)
        status = server.process.wait(timeout=GONE)
        assert (
            status
            in {signal.SIGTERM: (0, 143), signal.SIGINT: (0, 130), signal.SIGKILL: (-9,)}[number]
        )
        server.nothing_left()
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(("127.0.0.1", int(server.url.rpartition(":")[2])))
    finally:
        if server.process.poll() is None:
            server.process.kill()
