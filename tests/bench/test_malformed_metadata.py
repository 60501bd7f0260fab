"""What servers tell about themselves, damaged.

Pages: /v1/models, /version, /metrics and /server_info while bench runs, and the metrics that watch
reads. What is not understood is unmeasured with its reason; nothing ends a run.
"""

import asyncio
import json
import random
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from tests.bench.conftest import answering
from trtspec.bench.load import assemble, measure
from trtspec.bench.questions.datasets import Dataset, Question
from trtspec.bench.results import BenchResults
from trtspec.bench.watch import Watch
from trtspec.client.client import RequestSampling, new_client
from trtspec.errors import TrtspecError

Pages = dict[str, str]
STREAM = "".join(
    f"data: {json.dumps(event)}\n\n"
    for event in (
        {
            "choices": [
                {"index": 0, "delta": {"content": "four words are here"}, "finish_reason": "stop"}
            ]
        },
        {"choices": [], "usage": {"prompt_tokens": 3, "completion_tokens": 4}},
    )
)
DRAFTS, DRAFTED, ACCEPTED = (
    f"vllm:spec_decode_num_{name}_total" for name in ("drafts", "draft_tokens", "accepted_tokens")
)
BY_POSITION = "vllm:spec_decode_num_accepted_tokens_per_pos_total"
ODD = (
    "NaN",
    "+Inf",
    "-Inf",
    "abc",
    "-3",
    "1.5",
    "1e400",
    "9" * 400,
    "",
    "0x3",
    "{",
    '"',
    "1 2 3",
    "\x00",
    "\ud800",
)
WORKLOAD = measure.BenchWorkload(
    dataset=Dataset(
        "two", "0" * 64, (Question("a", "c", ("Why?",)), Question("b", "c", ("How?",)))
    ),
    sampling=RequestSampling(max_tokens=8),
    concurrency=(1,),
    warmup=0,
)


JUNK: tuple[Any, ...] = (
    None,
    True,
    -1,
    0,
    1.5,
    10**400,
    1e308,
    float("inf"),
    float("nan"),
    "",
    "\ud800",
    "x" * 50,
    "9" * 50,
    [],
    [None],
    {},
    {"a": []},
    "NaN",
)


def mutated(value: Any, dice: random.Random) -> Any:
    """The value with something of it replaced, dropped or doubled."""
    if dice.random() < 0.12:
        return dice.choice(JUNK)
    if isinstance(value, dict):
        return {key: mutated(item, dice) for key, item in value.items() if dice.random() > 0.05}
    if isinstance(value, list):
        return [mutated(item, dice) for item in value for _ in range(1 + (dice.random() < 0.05))]
    return value


def metrics(drafts: str = "10", accepted: str = "4", position: str = "0") -> str:
    return (
        f'# TYPE {DRAFTS} counter\n{DRAFTS}{{engine="0"}} {drafts}\n{DRAFTED}{{engine="0"}} 30\n'
        f'{ACCEPTED}{{engine="0"}} {accepted}\n'
        f'{BY_POSITION}{{engine="0",position="{position}"}} 4\n'
        'vllm:generation_tokens_total{engine="0"} 14\nvllm:num_requests_running{engine="0"} 1\n'
    )


def pages(kind: str) -> Pages:
    """What an honest server of that kind says."""
    found = {
        "/v1/models": json.dumps({"data": [{"id": "m", "owned_by": kind}]}),
        "/version": '{"version": "1.0"}',
    }
    if kind == "vllm":
        return {**found, "/metrics": metrics()}
    return found


async def served(
    found: Callable[[str], str | None],
    then: Callable[[str], Awaitable[Any]],
    asked: list[Any] | None = None,
) -> Any:
    """Awaits `then(url)` while a server answers `found(path)` at each path.

    Every chat gets the same words, and `asked` its body.
    """

    def answer(path: str, body: Any) -> bytes | None:
        if body is not None and asked is not None:
            asked.append(body)
        text = found(path) if body is None else STREAM
        return None if text is None else text.encode("utf-8", "surrogatepass")

    return await answering(answer, then)


def bench(first: Pages, later: Pages) -> BenchResults:
    """A whole run on a server whose pages are `later` from their second request on."""
    asked: set[str] = set()

    def found(path: str) -> str | None:
        page = (later if path in asked else first).get(path)
        asked.add(path)
        return page

    targets = asyncio.run(served(found, lambda url: measure.measure({"e": url}, WORKLOAD)))
    results = assemble.assemble(targets)
    assert (
        json.loads(json.dumps(results.to_dict(), ensure_ascii=False).encode())["turns"] is not None
    )
    return results


def reasons(results: BenchResults) -> list[str]:
    return [
        problem.message for problem in results.problems if problem.code == "TS-BENCH-NO-ACCEPTANCE"
    ]


@pytest.mark.parametrize(
    "models", ['{"data":["x"]}', '{"data":{"a":1}}', '{"data":[{}]}', "[]", '{"data":[{"id":1}]}']
)
def test_a_list_of_models_that_is_none_is_named(models: str) -> None:
    with pytest.raises(
        TrtspecError, match=r"http://127.0.0.1:\d+/v1/models answered 200 without a model"
    ):
        bench({"/v1/models": models}, {})


@pytest.mark.parametrize(
    ("page", "text", "says"),
    [
        ("/metrics", metrics(drafts="NaN"), "NaN, which is not a count"),
        ("/metrics", metrics(drafts="+Inf"), "not a count"),
        ("/metrics", metrics(drafts="abc"), "not Prometheus text"),
        ("/metrics", metrics(drafts="3"), "counts less after the run than before it"),
        ("/metrics", metrics(position="x"), "of the position 'x'"),
        (
            "/metrics",
            metrics(drafts="11", accepted="5").replace('"0"} 4', '"0"} 9'),
            "measured in part",
        ),
    ],
)
def test_figures_that_are_none_are_unmeasured_with_their_reason(
    page: str, text: str, says: str
) -> None:
    """They change while the run goes on: its answers and times are kept."""
    results = bench(pages("vllm"), {**pages("vllm"), page: text})
    assert any(says in reason.replace("nan", "NaN") for reason in reasons(results)), (
        results.problems
    )
    assert (
        results.concurrency[0].throughput.requests == 2
        and results.concurrency[0].throughput.errors == 0
    )
    assert says == "measured in part" or results.acceptance_length is None


def test_honest_counters_are_read() -> None:
    results = bench(
        pages("vllm"), {**pages("vllm"), "/metrics": metrics("14", "6").replace('"0"} 4', '"0"} 6')}
    )
    assert (results.steps, results.accepted, results.histogram, reasons(results)) == (
        4,
        2,
        [2, 2],
        [],
    )


def damaged(page: str, dice: random.Random) -> str:
    """A page with something replaced, dropped or doubled."""
    if page.startswith(("{", "[")):
        text = json.dumps(mutated(json.loads(page), dice))
    else:
        lines = page.splitlines()
        at = dice.randrange(len(lines))
        words = lines[at].rsplit(" ", 1)
        changed = dice.choice(
            (
                f"{words[0]} {dice.choice(ODD)}",
                "",
                lines[at] * 2,
                lines[at].replace('"', ""),
                lines[at].replace('="0"', f'="{dice.choice(ODD)}"'),
            )
        )
        text = "\n".join([*lines[:at], changed, *lines[at + 1 :]]) + "\n"
    place = dice.randrange(len(text) + 1)
    return (
        text
        if dice.random() < 0.8
        else text[:place] + dice.choice(("", "\x00", "\ud800", "}", text))
    )


def fuzz(seeds: range) -> tuple[int, int]:
    """(runs, runs with acceptance) of bench, each on a server that damages one of its pages.

    The page is damaged from the first or from the second time on. A run that cannot begin says so
    in words.
    """
    runs = measured = 0
    for seed in seeds:
        dice = random.Random(seed)
        honest = pages("vllm")
        grown = {**honest, "/metrics": metrics("14", "6").replace('"0"} 4', '"0"} 6')}
        path = dice.choice(list(honest))
        later = {**grown, path: damaged(grown[path], dice)}
        try:
            results = bench(later if dice.random() < 0.5 else honest, later)
        except TrtspecError as error:
            assert path == "/v1/models" and "without a model" in error.message
            continue
        runs += 1
        measured += results.acceptance_length is not None
    return runs, measured


def fuzz_watch(seeds: range) -> int:
    """How many of two readings of damaged metrics succeeded; the others say why not."""
    drafts = {"numRequestsWithDraftTokens": 4, "numDraftTokens": 12, "numAcceptedTokens": 6}
    iteration = {"iter": 1, "numActiveRequests": 4, "specDecodingStats": drafts}
    bodies = [
        (
            seed,
            random.Random(seed).choice(
                (metrics(), json.dumps([iteration, {**iteration, "iter": 2}]))
            ),
        )
        for seed in seeds
    ]
    current = ""

    async def ask(url: str) -> int:
        nonlocal current
        read = 0
        async with new_client(url) as client:
            for seed, page in bodies:
                dice, watch = random.Random(seed), Watch(url)
                for _ in range(2):
                    current = damaged(page, dice) if dice.random() < 0.8 else page
                    try:
                        await watch.read(client)
                        read += 1
                    except TrtspecError as error:
                        assert "metrics" in error.message
                    json.dumps(watch.summary(), allow_nan=False)
        return read

    return asyncio.run(served(lambda path: current if path == "/metrics" else None, ask))


def test_damaged_metadata_never_ends_a_run() -> None:
    runs, measured = fuzz(range(20))
    assert runs > 10 and 2 < measured < runs
    assert 20 < fuzz_watch(range(50)) < 100


@pytest.mark.slow
def test_much_damaged_metadata_never_ends_a_run() -> None:
    assert fuzz(range(1000, 1600))[0] > 300
    assert fuzz_watch(range(1000, 4000)) > 1200


def test_a_frontend_that_passes_nothing_on_is_not_taken_for_acceptance() -> None:
    """As Dynamo's: bench measures speed alone and says so."""
    frontend = {"/v1/models": json.dumps({"data": [{"id": "m", "owned_by": "nvidia"}]})}
    results = bench(frontend, {**frontend, "/metrics": "dynamo_frontend_requests_total 3\n"})
    assert ["reports nothing about speculation" in reason for reason in reasons(results)] == [True]
