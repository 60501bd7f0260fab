"""`prove`: which commands make a proof, with which prompts, and what their outputs amount to. Runs nothing.

A proof is a list of steps, each one command of trtspec with its output. Steps that need a server name its launch; the
launches follow each other, the plain one first, because they want the same GPUs. The verdict is judged line by line.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from trtspec.bench.report.tables import thinking_words

PLAIN = "plain"
URL = "{url}"  # in a step's words: where its server answers
WORK = "{work}"  # the directory of the whole proof's outputs
RATES = {"reference": 60.0, "vllm": 80.0, "trtllm": 120.0}  # output tokens per second of one request, for estimates
STARTS = {"reference": 15.0, "vllm": 600.0, "trtllm": 900.0}  # seconds until a server is ready
PLAN_TOLERANCE = 0.20  # relative; what docs/plan-model.md states for held-out figures
MEMORY_TOLERANCE = 0.10
WARM_LOSS = 0.15  # acceptance on a repeated prompt may be this much lower
COLD_REUSE = 0.25  # largest share of prompt tokens from the cache in what is called cold: templates begin alike
WARM_REUSE = 0.5  # and smallest in what is called warm
LONG_LOSS = 0.50  # and on the longest prompts this much, against the shortest
REPEATED = 8  # prompts of the steps cold and warm
PER_LENGTH = 4  # prompts of each length
PREFIX = 600  # tokens before each question of cold and warm
MIN_ACCEPTANCE = 1.05  # of check
CHECKED = 40  # questions of check at most
DEGENERATE = "degenerate output"
USED_SHARE = 0.1  # of the largest rise of memory; ranks of one server take about the same
FEWEST_STEPS = 50  # of a part that is compared with another


@dataclass(frozen=True)
class ProveSetup:
    """What is to be proved, and with how much. `serve_words` go to `trtspec serve` in each launch; `thinking` is the
    mode in which every bench asks, and part of the name of each figure of it."""

    target: str
    head: str
    backend: str
    draft_len: int
    gpu: str | None
    gpus: int
    dataset: str
    samples: int
    max_tokens: int
    concurrency: tuple[int, ...]
    contexts: tuple[int, ...]
    serve_words: tuple[str, ...] = ()
    thinking: str | None = None


@dataclass(frozen=True)
class ProveStep:
    """One command: `words` after `trtspec`. `launch` is the server that it needs ("" without one). `statuses` are those
    that count as done: 3 is a finding, not a failure. Seconds are an estimate."""

    name: str
    words: tuple[str, ...]
    launch: str = ""
    statuses: tuple[int, ...] = (0, 3)
    seconds: float = 5.0


def launches(setup: ProveSetup) -> list[str]:
    """Names of the servers in their order: plain, the longest draft, then the shorter ones."""
    return [PLAIN, *(f"k{length}" for length in range(setup.draft_len, 0, -1))]


def serve_words(setup: ProveSetup, launch: str, port: int | None = None) -> tuple[str, ...]:
    """After `trtspec serve`; at this port of localhost if there is one. What the user passes comes last, since it may
    end in a `--` with words for the engine."""
    words: tuple[str, ...] = (setup.target, "--backend", setup.backend)
    if port is not None:
        words += ("--host", "127.0.0.1", "--port", str(port))
    if launch != PLAIN:
        words += ("--head", setup.head, "--draft-len", launch.removeprefix("k"))
    if setup.backend != "reference":
        words += ("--tp-size", str(setup.gpus))
    return words + setup.serve_words


def steps_of(setup: ProveSetup) -> list[ProveStep]:
    """All steps in their order."""
    return [*_offline(setup), *(step for launch in launches(setup) for step in _measured(setup, launch))]


def _offline(setup: ProveSetup) -> Iterator[ProveStep]:
    pair = ("--head", setup.head)
    yield ProveStep("doctor", ("doctor", "--json"))
    yield ProveStep("inspect-target", ("inspect", setup.target, "--json"))
    yield ProveStep("inspect-head", ("inspect", setup.head, "--against", setup.target, "--json"))
    if setup.gpu is not None:
        levels = ",".join(map(str, setup.concurrency))
        sizes = ("--gpu", setup.gpu, "--gpus", str(setup.gpus), "--concurrency", levels, "--json")
        yield ProveStep("plan", ("plan", setup.target, *pair, *sizes), statuses=(0, 1, 3))
    if setup.backend == "trtllm":
        for name, head in (("plain", ()), ("head", pair)):
            file = f"{WORK}/engine-{name}.yml"
            size = ("--tp-size", str(setup.gpus), "--force")
            yield ProveStep(f"config-{name}", ("build-config", setup.target, *head, *size, "-o", file), statuses=(0,))
            lint = ("lint", file, "--target", setup.target, *head, "--installed", "--json")
            yield ProveStep(f"lint-{name}", lint, statuses=(0, 3, 4), seconds=60)


def _measured(setup: ProveSetup, launch: str) -> Iterator[ProveStep]:
    """The commands that ask one server."""
    levels = ",".join(map(str, setup.concurrency))
    asked = ("--dataset", setup.dataset, "--samples", str(setup.samples), "--max-tokens", str(setup.max_tokens))

    def bench(name: str, *words: str, answers: float, at: int) -> ProveStep:
        where = (*(("--thinking", setup.thinking) if setup.thinking else ()), "-o", f"{WORK}/{name}", "--force")
        seconds = answers * setup.max_tokens / (RATES[setup.backend] * min(at, 8))
        return ProveStep(name, ("bench", f"{launch}={URL}", *words, *where), launch, seconds=seconds)

    each, middle = 2 * setup.samples, sorted(setup.concurrency)[len(setup.concurrency) // 2]
    speed = bench(f"bench-{launch}", *asked, "--concurrency", levels, answers=each * len(setup.concurrency), at=middle)
    checked, recording = min(setup.samples, CHECKED), f"{WORK}/recording.json"
    cost = checked * 128 / RATES[setup.backend] / 3
    if launch == PLAIN:
        sizes = ("--dataset", setup.dataset, "--samples", str(checked), "--max-tokens", "128", "--json")
        yield ProveStep("record", ("check", URL, "--record", recording, "--force", *sizes), launch, seconds=cost)
        yield speed
        return
    if launch != launches(setup)[1]:
        yield speed
        return
    against = ("check", URL, "--against", recording, "--min-acceptance", str(MIN_ACCEPTANCE), "--json")
    yield ProveStep("check", against, launch, seconds=cost)
    yield speed
    hot = (*asked, "--concurrency", str(setup.concurrency[0]), "--temperature", "1")
    yield bench("bench-sampled", *hot, answers=setup.samples, at=setup.concurrency[0])
    yield from _own_prompts(setup, bench)


def _own_prompts(setup: ProveSetup, bench: Callable[..., ProveStep]) -> Iterator[ProveStep]:
    """What is measured on prompts of the proof's own, one step for each state of the cache and each length: a server
    that keeps only totals tells nothing of parts of a step. Warm-up asks each prompt of `warm`, and no other: a
    server may have been started anew since `cold` asked them."""
    sizes = {"cold": 0, "warm": REPEATED} | {f"long-{size}": 0 for size in setup.contexts}
    for name, warmup in sizes.items():
        alone = ("--dataset", f"{WORK}/{name}.jsonl", "--concurrency", "1", "--warmup", str(warmup))
        answers = 2 * (PER_LENGTH if name.startswith("long") else REPEATED)
        yield bench(f"bench-{name}", *alone, "--max-tokens", str(setup.max_tokens), answers=answers, at=1)


def prompts_of(setup: ProveSetup, questions: Sequence[str]) -> dict[str, list[dict[str, Any]]]:
    """The rows of the prompt files that a proof makes, by step: real text before a question, up to about the number of
    tokens that a length names (four characters each). `cold` and `warm` have the same prompts. Each begins with words
    of its own, so that none shares more than the chat template with anything else that the server is asked. Raises
    ValueError without questions."""
    if not questions:
        raise ValueError("no questions")
    text = "\n\n".join(questions)

    def rows(category: str, tokens: int, count: int, mark: str) -> list[dict[str, Any]]:
        return [
            {"id": f"{category}-{n}", "category": category,
             "prompt": f"{mark} {n + 1}: {_filler(text, tokens, n)}\n\n{question}"}
            for n, question in enumerate(questions[:count])
        ]  # fmt: skip

    found = {state: rows(state, PREFIX, REPEATED, "Proof, repeated text") for state in ("cold", "warm")}
    for size in setup.contexts:
        found[f"long-{size}"] = rows(f"{size} tokens", size, PER_LENGTH, f"Length {size}, text")
    return found


def _filler(text: str, tokens: int, number: int) -> str:
    """Another part of the text for each number."""
    wanted, start = 4 * tokens, (number * 997) % max(1, len(text))
    return ((text[start:] + "\n\n") + (text + "\n\n") * (wanted // len(text) + 1))[:wanted]


@dataclass(frozen=True)
class ProveLine:
    """One line of the verdict."""

    name: str
    status: Literal["pass", "fail", "skipped"]
    message: str


@dataclass(frozen=True)
class ProveEvidence:
    """What the steps left: their `outputs` by name, `speed_of` each launch, and by launch the `memory` and the seconds
    of its start. `mode` is what the name of every figure says of thinking."""

    setup: ProveSetup
    outputs: Mapping[str, Any]
    speed: Mapping[str, Mapping[str, Mapping[str, float | None]]]
    memory: Mapping[str, Mapping[str, Any]]

    @property
    def gpus(self) -> list[dict[str, Any]]:
        return (self.outputs.get("doctor") or {}).get("gpus", [])

    @property
    def engine(self) -> str | None:
        """Its version, by `lint --installed` or by the plain server."""
        by_server = (self.outputs.get(f"bench-{PLAIN}") or {}).get("server", {}).get("version")
        return (self.outputs.get("lint-plain") or {}).get("version") or by_server

    @property
    def mode(self) -> str:
        return thinking_words(self.setup.thinking)

    def long_parts(self) -> dict[str, Mapping[str, Any] | None]:
        """The output of the bench step of each prompt length, shortest first."""
        return {f"{size} tokens": self.outputs.get(f"bench-long-{size}") for size in sorted(self.setup.contexts)}


def taken(before: Sequence[int] | None, after: Sequence[int] | None) -> list[int] | None:
    """Bytes that a launch took of each GPU that it uses, from those in use on all GPUs before and after its start; None
    where they are not known. What other jobs hold counts for nothing; a GPU whose memory rose by less than a tenth of
    the most is not the launch's."""
    if before is None or after is None or len(before) != len(after):
        return None
    rises = [max(0, now - then) for then, now in zip(before, after, strict=True)]
    return [rise for rise in rises if rise > max(rises) * USED_SHARE] or None


def speed_of(results: Mapping[str, Any]) -> dict[str, dict[str, float | None]]:
    """By concurrency: tokens per second, acceptance length, and milliseconds of one verification step (tokens per step
    over the speed of one request)."""
    found = {}
    for level in results["concurrency"]:
        through = level["throughput"]
        rate = through["steady_tokens_per_s"] or through["tokens_per_s"]
        length = level["acceptance_length"] if level.get("drafted") != 0 else None
        gap = through["inter_token_s"]["mean"] if through.get("inter_token_s") else None
        step = gap * (length or 1.0) * 1000 if gap else None
        found[str(level["concurrency"])] = {"tokens_per_s": rate, "acceptance_length": length, "step_ms": step}
    return found


def judge(evidence: ProveEvidence) -> list[ProveLine]:
    """The verdict, from the outputs of the steps. Without installation, pair, check or speed nothing is proved: these
    fail where they are missing. Anything else that was not measured is skipped, and says so."""
    outputs = evidence.outputs
    lines = [
        _problems("installation", outputs.get("doctor")),
        _problems("target", outputs.get("inspect-target")),
        _problems("head and pair", outputs.get("inspect-head")),
    ]
    if evidence.setup.backend == "trtllm":
        lines += [_lint(name, outputs.get(f"lint-{name}")) for name in ("plain", "head")]
    checked = (outputs.get("check") or {}).get("results", ())
    lines += [ProveLine(f"check: {r['name']}", r["status"], r["message"]) for r in checked]
    if not checked:
        lines.append(ProveLine("check", "fail", "no output: whether the answers are the same was not looked at"))
    for line in (*_acceptance(evidence), *_speed(evidence)):
        lines.append(replace(line, name=f"{line.name}{evidence.mode}"))
    plan = list(_plan(evidence))
    return lines + (plan or [ProveLine("plan", "skipped", "no plan of the GPUs that were measured")])


def _plan(evidence: ProveEvidence) -> Iterator[ProveLine]:
    """Step times and memory against the plan; nothing where the measured GPUs are not the planned ones. Memory that was
    taken on another number of GPUs than planned is not compared."""
    plan = evidence.outputs.get("plan") or {}
    names = [gpu["name"].lower() for gpu in evidence.gpus]
    if not plan.get("points") or not names or not all(plan["gpu"].lower() in name for name in names):
        return
    steps = {(point["concurrency"], point["draft_len"]): point["step_ms"] for point in plan["points"]}
    for launch, measured in evidence.speed.items():
        drafts = 0 if launch == PLAIN else int(launch.removeprefix("k"))
        for level, figures in measured.items():
            planned, step_ms = steps.get((int(level), drafts)), figures.get("step_ms")
            if planned and step_ms:
                what = f"step time, {launch}, concurrency {level}{evidence.mode} (ms)"
                yield _against_plan(what, planned, step_ms, PLAN_TOLERANCE)
    for launch, used in evidence.memory.items():
        what, found = f"memory of one GPU, {launch} (bytes)", used.get("per_gpu") or ()
        if len(found) == plan["gpus"]:
            planned = sum(plan["per_gpu"][part] for part in ("weights", "kv", *(() if launch == PLAIN else ("head",))))
            yield _against_plan(what, planned, max(found), MEMORY_TOLERANCE)
        elif found:
            why = f"memory rose on {len(found)} GPUs, the plan is for {plan['gpus']}"
            yield ProveLine(f"plan: {what}", "skipped", why)


def _against_plan(what: str, planned: float, measured: float, tolerance: float) -> ProveLine:
    ratio = measured / planned
    shown = f"planned {planned:.4g}, measured {measured:.4g} (x {ratio:.2f})"
    return ProveLine(f"plan: {what}", "pass" if abs(ratio - 1) <= tolerance else "fail", shown)


def _problems(name: str, output: Mapping[str, Any] | None) -> ProveLine:
    if output is None or "problems" not in output:
        why = (output or {}).get("error", {}).get("message", "no output")
        return ProveLine(name, "fail", why)
    errors = [p for p in output["problems"] if p["severity"] == "error"]
    first = f"{errors[0]['code']}: {errors[0]['message']}" if errors else "no errors"
    return ProveLine(name, "fail" if errors else "pass", first)


def _lint(name: str, output: Mapping[str, Any] | None) -> ProveLine:
    if output is None or output.get("error"):
        why = (output or {}).get("error", {}).get("message", "no output")
        return ProveLine(f"lint `installed`: {name}", "skipped", why)
    line = _problems(f"lint `installed`: {name}", output)
    return ProveLine(line.name, line.status, f"{line.message}, for {output.get('version')}")


def _acceptance(evidence: ProveEvidence) -> Iterator[ProveLine]:
    outputs = evidence.outputs
    hot = outputs.get("bench-sampled") or {}
    sampled = hot.get("acceptance_length")
    if degenerate(hot):
        yield ProveLine("acceptance: sampled", "skipped", DEGENERATE)
    elif sampled is None:
        yield ProveLine("acceptance: sampled", "skipped", "not measured, or the server does not tell it")
    else:
        yield ProveLine("acceptance: sampled", "pass", f"{sampled:.3f} tokens per step")
    states = {state: outputs.get(f"bench-{state}") for state in ("cold", "warm")}
    line = _compared_parts("acceptance: warm", states, WARM_LOSS)
    yield line if line.status == "skipped" else _reuse(line, states)
    yield _compared_parts("acceptance: long", evidence.long_parts(), LONG_LOSS)


def degenerate(results: Mapping[str, Any], category: str | None = None) -> bool:
    """Whether the answers of a bench step, or those of one of its categories, are noise or loops: acceptance on them is
    no figure."""
    found = results.get("degeneration") if category is None else (results.get("quality") or {}).get(category)
    return bool((found or {}).get("degenerate"))


def _compared_parts(name: str, parts: Mapping[str, Mapping[str, Any] | None], allowed: float) -> ProveLine:
    """The least acceptance of the later parts against the first one's. Figures are those of all answers of a step: its
    categories are counted in a second pass by servers that keep totals only, when each prompt is in the cache."""
    if looping := [part for part, found in parts.items() if found and degenerate(found)]:
        return ProveLine(name, "skipped", f"{DEGENERATE} ({', '.join(looping)})")
    known = {part: found for part, found in parts.items() if found and found.get("acceptance_length") is not None}
    lengths = {part: found["acceptance_length"] for part, found in known.items()}
    shown = "; ".join(f"{part} {length:.3f}" for part, length in lengths.items())
    missing = [part for part in parts if part not in known]
    if missing:
        why = f"not measured, or the server does not tell it: {', '.join(missing)}"
        return ProveLine(name, "skipped", f"{why}; {shown}" if shown else why)
    fewest = min((found["steps"] or 0 for found in known.values()), default=0)
    if len(known) < 2 or fewest < FEWEST_STEPS:
        return ProveLine(name, "skipped", f"{shown}; too few steps to compare ({fewest})")
    first, *later = lengths.values()
    lost = 1 - (min(later) - 1) / (first - 1) if first > 1 else 0.0
    return ProveLine(name, "fail" if lost > allowed else "pass", f"{shown}; lost {lost:.0%}")


def _reuse(line: ProveLine, states: Mapping[str, Mapping[str, Any] | None]) -> ProveLine:
    """The line with what the server says it took from its cache. A cold prompt that was cached, or a warm one that was
    not, makes a comparison of nothing."""
    cold, warm = (reused(states[state] or {}) for state in ("cold", "warm"))
    if cold is None or warm is None:
        return ProveLine(
            line.name, line.status, f"{line.message}; the server does not tell what it took from its cache"
        )
    shown = f"{line.message}; {cold:.0%} and {warm:.0%} of prompt tokens from the cache"
    if cold > COLD_REUSE or warm < WARM_REUSE:
        why = "cold prompts were cached already" if cold > COLD_REUSE else "the server reuses no prefix"
        return ProveLine(line.name, "skipped", f"{why}: {shown}")
    return ProveLine(line.name, line.status, shown)


def reused(results: Mapping[str, Any]) -> float | None:
    """Share of the prompt tokens that came from the server's cache; None where it does not tell."""
    found = [level["throughput"] for level in results.get("concurrency", ())]
    if not found or any(part.get("cached_prompt_tokens") is None or not part.get("prompt_tokens") for part in found):
        return None
    asked = sum(part["prompt_tokens"]["mean"] * (part["requests"] - part["errors"]) for part in found)
    return sum(part["cached_prompt_tokens"] for part in found) / asked if asked else None


def _speed(evidence: ProveEvidence) -> Iterator[ProveLine]:
    plain = evidence.speed.get(PLAIN, {})
    heads = {launch: levels for launch, levels in evidence.speed.items() if launch != PLAIN}
    for level in map(str, evidence.setup.concurrency):
        base = (plain.get(level) or {}).get("tokens_per_s")
        rates = {launch: (levels.get(level) or {}).get("tokens_per_s") for launch, levels in heads.items()}
        known = {launch: rate for launch, rate in rates.items() if rate}
        if not known or not base:
            missing = "with the head" if base else "of the plain server"
            yield ProveLine(f"speed at concurrency {level}", "fail", f"the speed {missing} was not measured")
            continue
        best = max(known, key=lambda launch: known[launch])
        gain = known[best] / base
        shown = f"{base:.1f} tokens/s plain, {known[best]:.1f} with {best} (x {gain:.2f})"
        yield ProveLine(f"speed at concurrency {level}", "pass" if gain > 1 else "fail", shown)
