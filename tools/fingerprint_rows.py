"""One side of tools/fingerprint.py: runs the corpus and writes every row to rows.json.

The package on PYTHONPATH is used as a user uses it: `python -m trtspec ...`, in this process where
the command allows it, and the reference server over HTTP. Nothing of it is imported here, so that
nothing here follows when it is taken apart.
"""

from __future__ import annotations

import contextlib
import datetime
import hashlib
import io
import itertools
import json
import os
import re
import runpy
import shutil
import socket
import subprocess
import sys
import time
import traceback
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

FAILED = re.compile(r"crashed|status (?!0|3)")
FIGURE = r"-?[\d.]+(?:e[-+]?\d+)?"
# What two runs of one package do not have in common: what is replaced, by what, and why
NORMALIZED = [
    (
        r'(\\?"(?:[a-z_]*seconds(?:_estimate)?|[a-z]+_per_second)\\?": )' + FIGURE,
        r"\g<1>0",
        "a clock",
    ),
    (
        r'(\\?"[a-z_]*(?:rss|free|free_memory|memory)_bytes\\?": )\d+',
        r"\g<1>0",
        "memory and disk of the moment",
    ),
    (r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(?:\.\d+)?(?:Z|\+00:00)?", "TIME", "the clock"),
    (re.escape(f"{datetime.date.today()}"), "TODAY", "the clock"),
    (
        r'(\\?"position\\?": )\[[\d, ]+\]',
        r"\1[]",
        "bytes of a training log, in which timings stand",
    ),
    (
        r"\b(about|in|took) [\d.,]+ (s|min|minutes|seconds)\b",
        r"\1 0 s",
        "a clock, in a message or a card",
    ),
    (r'("missed_[a-z_]+": )\d+', r"\g<1>0", "how often a busy machine came to ask"),
    (r"peak memory [\d.,]+", "peak memory 0", "memory of the moment"),
    (r"127\.0\.0\.1:\d{5}|localhost:\d{5}|--port \d{5}", "ADDRESS", "a free port of the moment"),
    (
        r'("(?:id|created)": )("(?:cmpl|chatcmpl)-[0-9a-f]+"|\d{9,})',
        r"\1ID",
        "names of requests are drawn at random",
    ),
]
UNSTEADY = {"training.svg"}  # draws tokens per second
TEXT = {".json", ".jsonl", ".md", ".yaml", ".yml", ".svg", ".html", ".txt", ".jinja", ".xml", ""}
SOURCES, POLICIES = ("bf16", "flat", "int4", "fp8-block", "vision"), ("k2.5", "k2.6", "k2.7-code")
DIALECTS = ("modelopt", "vllm", "sglang", "speculators", "torchspec", "specforge", "safeailab")
KINDS = [
    f"{attention}-{eagle}-{vocab}"
    for attention in ("mha", "mla")
    for eagle in ("3", "3.1")
    for vocab in ("full", "128")
]
RELEASES = ("1.2.1", "1.3.0rc20", "1.4.0rc1")
PUBLISHED = {  # target: heads
    "nvidia/Kimi-K2-Thinking-NVFP4": (),
    "nvidia/Kimi-K2.5-NVFP4": ("nvidia/Kimi-K2.5-Eagle3", "lightseekorg/kimi-k2.5-eagle3-mla"),
    "nvidia/Kimi-K2.6-NVFP4": ("nvidia/Kimi-K2.6-Eagle3", "lightseekorg/kimi-k2.6-eagle3.1-mla"),
    "nvidia/Kimi-K2.7-Code-NVFP4": ("lightseekorg/kimi-k2.7-coder-eagle3.1-mla",),
    "moonshotai/Kimi-K2.6": ("nvidia/Kimi-K2.6-Eagle3",),
}
PAIRS = [
    f"{target} --head {head}" if head else target
    for target, heads in PUBLISHED.items()
    for head in ("", *heads)
]
TARGET = "nvidia/Kimi-K2.6-NVFP4"
PAIR = f"{TARGET} --head nvidia/Kimi-K2.6-Eagle3"


class Side:
    def __init__(self, package: Path, inputs: Path, work: Path, whole: bool) -> None:
        self.package, self.inputs, self.work, self.whole = package, inputs, work, whole
        self.rows: dict[str, str] = {}

    def command(
        self, line: str, name: str = "", *, own_process: bool = False, values: bool = True,
        **environment: str,
    ) -> str:  # fmt: skip
        """Adds a row for the command's answer: status and keys of its JSON, or its error.

        With `values`, a row for the whole object. IN/ and WORK/ in the line are the folders of
        inputs and of this side.
        """
        name = name or line
        words = line.replace("IN/", f"{self.inputs}/").replace("WORK/", f"{self.work}/").split()
        status, out, err = (outside if own_process else inside)(words, environment)
        crash = re.search(
            r"unexpected \w+: .*|^(?:\w+\.)*\w+(?:Error|Exception|Exit)\b.*\Z", err.strip(), re.M
        )
        if isinstance(status, str) or crash:
            self.rows[name] = self.normal(
                f"crashed: {status if isinstance(status, str) else crash and crash[0]}"
            )
            return out
        try:
            answer = json.loads(out)
        except ValueError:
            answer, text = None, out
        else:
            text = json.dumps(answer, indent=1, sort_keys=True)
        keys = sorted(keys_of(answer)) if answer is not None else []
        self.rows[name] = "\n".join([f"status {status}", *keys])
        if status not in (0, 3) and answer is None:
            text = err
        if values:
            self.rows[f"{name} says"] = self.normal(text)
        return out

    def files(self, name: str, place: Path) -> None:
        """A row for every file below the place."""
        for path in sorted(path for path in place.rglob("*") if path.is_file()):
            self.rows[f"{name}/{path.relative_to(place)}"] = self.content(path)

    def content(self, path: Path) -> str:
        data = path.read_bytes()
        if path.suffix == ".safetensors" and len(data) > 8:
            size = int.from_bytes(data[:8], "little")
            header = self.normal(data[8 : 8 + size].decode(errors="replace").rstrip())
            return f"header {digest(header.encode())} values {digest(data[8 + size :])}"
        if path.name in UNSTEADY:
            return "written"
        if path.suffix in TEXT:
            text = self.normal(data.decode(errors="replace"))
            if path.name.startswith(".trtspec-"):  # a journal: worker processes end in any order
                text = "\n".join(sorted(text.splitlines()))
            return text if len(text) < 100_000 else f"sha256 {digest(text.encode())}"
        return f"sha256 {digest(data)}"

    def normal(self, text: str) -> str:
        text = text.replace(sys.executable, "PYTHON")
        for path, word in ((self.inputs, "IN"), (self.work, "WORK"), (self.package, "PACKAGE")):
            text = text.replace(str(path), word)
        for pattern, put, _ in NORMALIZED:
            text = re.sub(pattern, put, text)
        return text

    def made(self, line: str, name: str = "", **options: Any) -> None:
        """The answer of a command that writes OUT, and its files."""
        name = name or line.replace("/", "_").replace(" ", "_")
        place = self.work / "out" / name
        shutil.rmtree(place, ignore_errors=True)
        place.parent.mkdir(parents=True, exist_ok=True)
        self.command(line.replace("OUT", f"WORK/out/{name}"), name, **options)
        if place.is_file():
            self.rows[f"{name}/"] = self.content(place)
        else:
            self.files(name, place)


def inside(words: list[str], environment: dict[str, str]) -> tuple[int | str, str, str]:
    """Runs `python -m trtspec` in this process: (status, stdout, stderr).

    The status of a crash is the last line of its traceback.
    """
    out, err, status = io.StringIO(), io.StringIO(), 0
    before, kept = dict(os.environ), sys.argv
    os.environ.update(environment)
    sys.argv = ["trtspec", *words]
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            runpy.run_module("trtspec", run_name="__main__")
    except SystemExit as stopped:
        status = stopped.code if isinstance(stopped.code, int) else int(stopped.code is not None)
    except BaseException:
        return traceback.format_exc().strip().splitlines()[-1], out.getvalue(), err.getvalue()
    finally:
        sys.argv = kept
        os.environ.clear()
        os.environ.update(before)
    return status, out.getvalue(), err.getvalue()


def outside(words: list[str], environment: dict[str, str]) -> tuple[int | str, str, str]:
    done = subprocess.run([sys.executable, "-m", "trtspec", *words], capture_output=True, text=True,
                          env=os.environ | environment, timeout=1800)  # fmt: skip
    return done.returncode, done.stdout, done.stderr


def keys_of(value: Any, prefix: str = "") -> set[str]:
    if isinstance(value, dict):
        return {
            path
            for key, item in value.items()
            for path in {f"{prefix}.{key}", *keys_of(item, f"{prefix}.{key}")}
        }
    if isinstance(value, list):
        return {path for item in value for path in keys_of(item, f"{prefix}[]")}
    return set()


def digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def quantize(side: Side) -> None:
    for source, policy in itertools.product(SOURCES, POLICIES):
        side.made(f"quantize IN/targets/{source} -o OUT --policy {policy} --json")
    for source in SOURCES if side.whole else ("bf16", "int4"):
        for options in ("--kv-cache none", "--weight-scales mse", "--workers 2"):
            side.made(f"quantize IN/targets/{source} -o OUT {options} --json")
    side.made("quantize IN/targets/nvfp4 -o OUT --json")
    if side.whole:
        for source in ("full-bf16", "full-int4", "full-fp8-block"):
            side.made(f"quantize IN/targets/{source} -o OUT --json", source, own_process=True)
            shutil.rmtree(side.work / "out" / source)
        side.made("quantize IN/targets/bf16 -o OUT --engine modelopt --json", own_process=True)


def calibrate(side: Side) -> None:
    for source in ("bf16", "int4", "fp8-block") if side.whole else ("bf16",):
        scales = f"{source}.safetensors"
        line = f"calibrate IN/targets/{source} IN/data/answers.jsonl -o OUT --samples 8 --json"
        side.made(line, scales, own_process=True)
        provenance = side.work / "out" / f"{scales}.provenance.json"
        side.rows[f"{source} provenance"] = side.content(provenance)
        side.made(f"quantize IN/targets/{source} -o OUT --input-scales WORK/out/{scales} --json")


def convert(side: Side) -> None:
    for kind in KINDS if side.whole else ("mha-3-128", "mla-3.1-full"):
        for source, layout in itertools.product(DIALECTS, DIALECTS):
            head = f"heads/{source}-{kind}"
            if (side.inputs / head).is_dir():
                to = "trtllm" if layout == "modelopt" else layout
                side.made(f"convert IN/{head} -o OUT --to {to} --json --target IN/targets/bf16")


def train(side: Side) -> None:
    kinds = list(itertools.product(("mha", "mla"), ("3", "3.1")))
    for attention, eagle in kinds if side.whole else kinds[::3]:
        options = f"--attention {attention} --eagle {eagle} --steps 6 --acceptance-prompts 2 --json"
        line = f"train IN/targets/bf16 IN/data/answers.jsonl -o OUT {options}"
        side.made(line, f"{attention}-{eagle}", own_process=True)


def greedy(side: Side) -> None:
    """Greedy answers by the reference server, with every type of head and without.

    A few one after the other, then all in one batch, whose rows end at different times, and that
    batch again, which reuses their beginnings.
    """
    heads = {"none": []}
    kinds = sorted(path.name for path in (side.inputs / "nano-heads").iterdir())
    for kind in kinds if side.whole else ("shipped", "mha-3-128", "mla-3-full"):
        heads[kind] = ["--head", str(side.inputs / "nano-heads" / kind)]
    lines = (side.inputs / "nano/prompts_heldout.jsonl").read_text().splitlines()[:50]
    chats = [{"messages": json.loads(line)["messages"]} for line in lines]
    batch = {"prompt": [chat["messages"][-1]["content"] for chat in chats], "stop": " a"}
    for kind, words in heads.items():
        with served(side, f"{kind} serves", *words) as url:
            for number, asked in enumerate([*chats[:6], batch, batch] if url else []):
                body = {
                    "max_tokens": 48 if side.whole else 16,
                    "temperature": 0,
                    "return_token_ids": True,
                }
                path = "completions" if asked is batch else "chat/completions"
                answer = post(f"{url}/v1/{path}", asked | body)
                text = json.dumps([answer["choices"], answer["usage"]], indent=1, sort_keys=True)
                empty = answer["usage"]["completion_tokens"] < 4
                side.rows[f"{kind} {number}"] = "crashed: an answer of nothing" if empty else text


def clients(side: Side) -> None:
    """Commands that query a server; clocks decide their figures, so only keys are compared."""
    few = "--samples 32 --max-tokens 96" if side.whole else "--samples 2 --max-tokens 8"
    with served(side, "serves", "--head", "IN/nano-heads/shipped") as url:
        if not url:
            return
        side.command(f"bench {url} {few} --concurrency 2 -o WORK/bench", "bench", values=False)
        results = side.work / "bench" / "results.json"
        keys = keys_of(json.loads(results.read_text())) if results.is_file() else {"none"}
        # whether there are problems depends on how steady the machine was
        steady = sorted(key for key in keys if not key.startswith(".problems[]"))
        side.rows["bench keys"] = "\n".join(steady)
        record = f"check {url} {few} --contexts 0 --record WORK/record.jsonl --json"
        side.command(record, "record", values=False)
        side.command(f"check {url} --against WORK/record.jsonl --json", "against", values=False)
        side.command(f"watch {url} --once --baseline WORK/bench --json", "watch", values=False)
        answers = f"synthesize IN/data/prompts.jsonl -o OUT --base-url {url}/v1 --samples 4"
        answers += " --max-tokens 8 --temperature 0 --concurrency 1 --json"
        side.made(answers, "synthesize")


@contextlib.contextmanager
def served(side: Side, name: str, *words: str) -> Iterator[str]:
    """The address of a reference server of kimi-nano, or "" if it did not start.

    A row says how it ended.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    url, log = f"http://127.0.0.1:{port}", side.work / "server.log"
    line = [sys.executable, "-m", "trtspec", "serve", f"{side.inputs}/nano", "--host", "127.0.0.1"]
    line += ["--backend", "reference", "--dtype", "float32", "--port", str(port)]
    line += [word.replace("IN/", f"{side.inputs}/") for word in words]
    with (
        open(log, "w") as written,
        subprocess.Popen(line, stdout=written, stderr=written) as process,
    ):
        try:
            for _ in range(600):
                if process.poll() is not None or ready(url):
                    break
                time.sleep(0.2)
            yield url if process.poll() is None and ready(url) else ""
        finally:
            process.terminate()
            status = process.wait(60)
    side.rows[name] = f"status {status}\n{side.normal(log.read_text())}"


def ready(url: str) -> bool:
    try:
        return urllib.request.urlopen(f"{url}/health", timeout=5).status == 200
    except OSError:
        return False


def post(url: str, body: dict[str, Any]) -> dict[str, Any]:
    request = urllib.request.Request(
        url, json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=600) as answer:
        return json.load(answer)


def lint(side: Side) -> None:
    """Configurations and mutations for every release, in bulk; each trap for its own release."""
    by_file(side, "configs", "")
    for release, place in itertools.product(RELEASES, ("configs", "mutations")):
        by_file(side, place, f"--trtllm-version {release}")
    by_file(side, "mutations", f"--target {PAIR} --gpu b200 --trtllm-version 1.3.0rc20")
    for number, trap in enumerate(json.loads((side.inputs / "lint" / "traps.json").read_text())):
        line = f"lint IN/lint/traps/trap-{number:03}.yml --json --trtllm-version {trap['release']}"
        line += f" {trap.get('words', '')}"
        line += f" -- {trap['passed']}" if "passed" in trap else ""
        side.command(line, f"trap {trap['name']}", **trap.get("environment", {}))


def by_file(side: Side, place: str, words: str) -> None:
    files = [str(file) for file in sorted((side.inputs / "lint" / place).iterdir())]
    name = f"{words} {place}"
    answer = side.command(f"lint {' '.join(files)} --json {words}", name, values=False)
    problems: dict[str, list[Any]] = {file: [] for file in files}
    for problem in (json.loads(answer) if answer else {}).get("problems", []):
        problems.setdefault(problem["where"].split(":")[0], []).append(problem)
    for file, own in problems.items():
        lines = [side.normal(json.dumps(problem, sort_keys=True)) for problem in own]
        side.rows[f"{name} {Path(file).name}"] = "\n".join([f"{len(own)} problems", *lines])


def build_config(side: Side) -> None:
    """Configurations, plans and dry-run launches for a table of intents."""
    gpus = ("b200", "gb200", "b300", "h200") if side.whole else ("b200", "h200")
    releases = RELEASES if side.whole else RELEASES[1:]
    sizes = ("--goal latency --tp-size 4", "--goal throughput --tp-size 8")
    for pair, gpu, goal, release in itertools.product(PAIRS, gpus, sizes, releases):
        side.command(f"build-config {pair} --gpu {gpu} {goal} --trtllm-version {release}")
    for pair in PAIRS:
        for options in BUILDS:
            side.made(f"build-config {pair} {options}")
        for options in LAUNCHES if side.whole else LAUNCHES[:2]:
            side.command(f"serve {pair} --dry-run --json {options}")


BUILDS = (
    "--format helm-values --trtllm-version 1.3.0rc20 -o OUT",
    "--format dynamo --trtllm-version 1.3.0rc22 -o OUT",
    "--disaggregated OUT --trtllm-version 1.4.0rc1 --context-url c:1 --generation-url g:1",
    "--role context --trtllm-version 1.4.0rc1",
    "--nodes 2 --tp-size 8 --trtllm-version 1.4.0rc1",
    (
        "--isl 4096 --osl 1024 --concurrency 32 --attention-dp --set print_iter_log=true "
        "--trtllm-version 1.3.0rc20"
    ),
)
LAUNCHES = (
    "--trtllm-version 1.3.0rc20",
    "--backend vllm --vllm-version 0.26.0",
    "--trtllm-version 1.4.0rc1 --goal throughput",
    "--trtllm-version 1.3.0rc20 --launcher lws --nodes 2",
    "--trtllm-version 1.3.0rc20 -- --log_level info",
)


def reports(side: Side) -> None:
    """Every command that reports with --json."""
    for target in ("bf16", "flat", "int4", "fp8-block", "nvfp4", "vision"):
        side.command(f"inspect IN/targets/{target} --json")
        side.command(f"quantize IN/targets/{target} -o x --dry-run --json")
        side.command(f"inspect IN/targets/{target} --sample 0 --json")
    for head in sorted((side.inputs / "heads").iterdir()):
        side.command(f"inspect IN/heads/{head.name} --json")
        side.command(f"inspect IN/heads/{head.name} --against IN/targets/bf16 --json")
    side.made("quantize IN/targets/int4 -o OUT --json", "quantized")
    for source in ("int4", "flat"):
        line = f"inspect WORK/out/quantized --against IN/targets/{source} --sample 0 --json"
        side.command(line)
    for name in (*PUBLISHED, *{head for heads in PUBLISHED.values() for head in heads}):
        side.command(f"inspect {name} --json", values=False)
    for pair, gpu in itertools.product(PAIRS, ("b200", "h200")):
        side.command(f"plan {pair} --gpu {gpu} --gpus 8 --json")
    for line in REPORTS:
        side.command(line)
    for line in REPORTS_BY_KEY:
        side.command(line, values=False)
    for command in COMMANDS:
        side.command(f"{command} --help", values=False)


REPORTS = (
    f"plan {PAIR} --ttft 500 --tpot 10 --acceptance 2.6@3 --json",
    "train IN/targets/bf16 IN/data/answers.jsonl -o x --dry-run --json",
    "convert IN/heads/vllm-mha-3-full -o x --to sglang --dry-run --json",
    "serve IN/nano --backend reference --dry-run --json",
)
REPORTS_BY_KEY = (
    "calibrate IN/targets/bf16 IN/data/answers.jsonl -o x --dry-run --json", "doctor --json",
    f"prove {PAIR} --dry-run --json",
)  # fmt: skip
COMMANDS = (
    "demo",
    "doctor",
    "inspect",
    "quantize",
    "calibrate",
    "synthesize",
    "train",
    "convert",
    "plan",
    "build-config",
    "lint",
    "serve",
    "bench",
    "check",
    "prove",
    "watch",
)


def refusals(side: Side) -> None:
    """Invalid input and unknown options: status and message."""
    folders = sorted(path.name for path in (side.inputs / "broken").iterdir() if path.is_dir())
    for name, line in itertools.product((*folders, "missing"), BROKEN):
        side.command(line.replace("BAD", f"IN/broken/{name}"))
    for name in ("syntax.yml", "list.yml", "missing.yml"):
        side.command(f"lint IN/broken/{name} --trtllm-version 1.4.0rc1 --json")
    for name in ("empty.jsonl", "bad.jsonl", "missing.jsonl"):
        for command in ("train", "calibrate"):
            side.command(f"{command} IN/targets/bf16 IN/broken/{name} -o x --dry-run --json")
    for command in COMMANDS:
        if command not in ("demo", "doctor"):  # these need no words
            side.command(command)
        side.command(f"{command} --no-such-option")
    for line in UNKNOWN:
        side.command(line)


BROKEN = (
    "inspect BAD --json",
    "inspect BAD --against IN/targets/bf16 --json",
    "convert BAD -o x --to vllm --json",
    "quantize BAD -o x --dry-run --json",
    "plan BAD --json",
    "build-config BAD --trtllm-version 1.4.0rc1 --json",
    "serve BAD --backend reference --dry-run --json",
    "train BAD IN/data/answers.jsonl -o x --dry-run --json",
    "calibrate BAD IN/data/answers.jsonl -o x --dry-run --json",
)
UNKNOWN = (
    "nothing",
    "quantize IN/targets/bf16 -o x --policy k9 --json",
    "quantize IN/targets/bf16 -o x --kv-cache int8 --json",
    "quantize IN/targets/bf16 -o x --weight-scales no --json",
    "quantize IN/targets/bf16 -o x --device tpu --json",
    "quantize IN/targets/bf16 -o IN/heads/vllm-mha-3-full --json",
    "quantize no/such-model -o x --json",
    "quantize IN/heads/vllm-mha-3-full -o x --json",
    "convert IN/heads/vllm-mha-3-full -o x --to nobody --json",
    "convert IN/targets/bf16 -o x --to vllm --json",
    "convert IN/heads/vllm-mla-3-full -o x --to safeailab --json",
    "train IN/targets/bf16 IN/data/answers.jsonl -o x --attention gqa --json",
    "train IN/targets/bf16 IN/data/answers.jsonl -o x --eagle 4 --json",
    "train IN/targets/bf16 IN/data/answers.jsonl -o x --aux-layers 99 --dry-run --json",
    "plan IN/targets/bf16 --gpu a100 --json",
    "plan IN/targets/bf16 --concurrency none --json",
    "plan no/such-model --json",
    f"build-config {TARGET} --trtllm-version 9.9 --json",
    f"build-config {TARGET} --trtllm-version nine --json",
    f"build-config {TARGET} --set nothing --json",
    f"build-config {TARGET} --tp-size 3 --json",
    f"build-config {TARGET} --format toml --json",
    f"build-config {TARGET} --head IN/heads/vllm-mha-3-full --json",
    "lint IN/lint/configs/none.yml --json",
    f"lint IN/broken/list.yml --target {TARGET} --trtllm-version 0.1 --json",
    f"serve {TARGET} --backend nobody --json",
    f"serve {TARGET} --dry-run --trtllm-version 1.3.0rc20 --json -- --nope",
    "serve IN/targets/bf16 --backend reference --dry-run --head IN/nano-heads/shipped --json",
    "bench http://127.0.0.1:9 --samples 2 --json",
    "bench nowhere --json",
    "check http://127.0.0.1:9 --json",
    "check http://127.0.0.1:9 --against IN/missing --json",
    "watch http://127.0.0.1:9 --once --json",
    "prove IN/missing --json",
    "synthesize IN/missing -o x --json",
    "synthesize IN/data/prompts.jsonl -o x --base-url http://127.0.0.1:9/v1 --json",
    "inspect IN/nano --against IN/nano-heads/shipped --json",
    "demo -o IN/nano --json",
)

AREAS = {
    "quantize": quantize,
    "calibrate": calibrate,
    "convert": convert,
    "train": train,
    "greedy": greedy,
    "clients": clients,
    "lint": lint,
    "build-config": build_config,
    "reports": reports,
    "refusals": refusals,
}


def cpu_seconds() -> float:
    """Of this process and of those that it started, so that a busy machine does not matter."""
    return sum(os.times()[:4])


def main() -> None:
    package, inputs, work = (Path(word) for word in sys.argv[1:4])
    core, form, areas = int(sys.argv[4]), sys.argv[5], sys.argv[6:]
    os.sched_setaffinity(0, {core})
    found = {}
    for area in areas:
        side, begin = Side(package, inputs, work / area, form == "whole"), cpu_seconds()
        side.work.mkdir()
        os.chdir(side.work)
        AREAS[area](side)
        found[area] = side.rows
        spent = cpu_seconds() - begin
        print(
            f"{work.name} {area}: {len(side.rows)} rows, {spent:.0f} s of CPU",
            file=sys.stderr,
            flush=True,
        )
    loaded = (
        Path(sys.modules["trtspec"].__file__ or "")
        if "trtspec" in sys.modules
        else package / "trtspec" / "x"
    )
    if package not in loaded.parents:
        sys.exit(f"fingerprint: {loaded} was run, not {package}")
    (work / "rows.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main()
