"""`trtspec watch` against servers on loopback: what it reads, exports and judges."""

import json
import signal
import socket
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.bench.conftest import results_of
from tests.bench.test_statistics import questions
from tests.command_line import TRTSPEC, Done, FixedServer, free_port, trtspec
from tests.json_files import write_json
from trtspec.bench.statistics import summarize
from trtspec.bench.watch import Watch, judge, read_baseline
from trtspec.client.servers import Counters, TurnCounts

VLLM = (
    "vllm:spec_decode_num_drafts",
    "vllm:spec_decode_num_draft_tokens",
    "vllm:spec_decode_num_accepted_tokens",
)
TRTLLM = (
    "trtllm:spec_decode_num_draft_tokens",
    "trtllm:spec_decode_num_accepted_tokens",
)  # as Dynamo writes them
Once = Callable[..., Any]  # watch --once: the process and the object that it prints
RECORD = ("numRequestsWithDraftTokens", "numDraftTokens", "numAcceptedTokens")


def prometheus(*values: object, names: tuple[str, ...] = VLLM) -> str:
    return "".join(
        f'{name}_total{{engine="0"}} {value}\n' for name, value in zip(names, values, strict=True)
    )


def iterations(*counts: tuple[object, object, object]) -> str:
    stats = [
        {"iter": n, "specDecodingStats": dict(zip(RECORD, values, strict=True))}
        for n, values in enumerate(counts)
    ]
    return json.dumps([{"iter": 0, "specDecodingStats": None}, *stats])


@pytest.fixture
def server() -> Iterator[FixedServer]:
    with FixedServer({}) as made:
        yield made
        made.shutdown()


def results(path: Path, turns: bool = True, **ratios: float) -> Path:
    """A results.json with 40 answers of 100 steps in each category."""
    groups = {
        name: [
            TurnCounts(
                f"{name}{n}", name, 100, 100, round(100 * ratio) + (-8, 8)[n % 2], 300, None, "x"
            )
            for n in range(40)
        ]
        for name, ratio in ratios.items()
    }
    return of_turns(path, groups, turns)


def of_turns(path: Path, groups: dict[str, list[TurnCounts]], turns: bool = True) -> Path:
    """A results.json with these answers by category; without `turns` they were counted together."""
    rows = [turn for group in groups.values() for turn in group] if turns else []
    found = results_of(rows, categories={name: summarize(group) for name, group in groups.items()})
    write_json(path, found.to_dict())
    return path


@pytest.fixture
def baseline(tmp_path: Path) -> Path:
    return results(tmp_path / "results.json", docs=1.5, code=2.1)


@pytest.fixture
def once(server: FixedServer, baseline: Path) -> Once:
    def run(*words: object, url: str = server.url) -> tuple[Done, dict[str, Any]]:
        done = trtspec("watch", url, "--once", "--baseline", baseline, "--json", *words)
        return done, done.json

    return run


@pytest.mark.parametrize(
    ("source", "body"),
    [
        ("vllm metrics", prometheus(900, 2700, 1350)),
        ("iteration statistics", iterations((500, 1500, 700), (400, 1200, 650))),
    ],
)
def test_the_counts_since_the_server_started_are_judged_at_the_first_reading(
    server: FixedServer, once: Once, source: str, body: str
) -> None:
    server.bodies["/metrics"] = body
    done, found = once()
    assert done.status == 0 and found["ok"] and found["status"] == "pass" and not found["problems"]
    assert [found[key] for key in ("source", "steps", "drafted", "accepted")] == [
        source,
        900,
        2700,
        1350,
    ]
    assert (
        found["acceptance_length"] == 2.5 and found["baseline"]["category"] == "docs"
    )  # the one that accepts least


def test_a_server_that_stops_accepting_is_found_with_a_baseline_of_bench(
    stand_in: Callable[..., str], dataset: Path, tmp_path: Path
) -> None:
    bench = ("--dataset", dataset, "--max-tokens", 96, "--concurrency", 8)
    for settings, status in (({}, 0), ({"forced": 0}, 3)):
        url = stand_in(kind="vllm", version="watched", **settings)
        assert trtspec("bench", url, *bench, "-o", tmp_path / str(status)).status in (0, 3)
        done = trtspec("watch", url, "--once", "--baseline", tmp_path / "0", "--json")
        assert done.status == status and done.json["status"] == ("fail" if status else "pass"), done


def test_a_drop_is_found_where_it_is_large_and_significant(
    server: FixedServer, once: Once, baseline: Path
) -> None:
    for accepted, words, status in (
        (4000, (), "fail"),  # 1.0 a step, a third less
        (4000, ("--max-drop", 0.4), "pass"),
        (5200, (), "pass"),  # 13 %
        (5200, ("--max-drop", 0.1), "fail"),
    ):
        server.bodies["/metrics"] = prometheus(4000, 12000, accepted)
        done, found = once(*words)
        assert (done.status, found["status"]) == (0 if status == "pass" else 3, status), found
        assert found["ok"] == (not found["problems"]) == (status == "pass")
        assert [problem["code"] for problem in found["problems"]] == ["TS-WATCH-BASELINE"] * (
            status == "fail"
        )
        assert (
            abs(found["drop"] - (1 - accepted / 6000)) < 1e-9 and found["significant_drop"] < 0.03
        )
    wide = results(
        baseline.with_name("wide.json"), turns=False, docs=1.5
    )  # its answers were counted together
    for accepted, status in (
        (400, "fail"),
        (600, "unmeasured"),
    ):  # 47 and 20 %; significant is more than 39 %
        server.bodies["/metrics"] = prometheus(500, 1500, accepted)
        found = once("--baseline", wide)[1]
        assert found["status"] == status and 0.3 < found["significant_drop"] < 0.46
    server.bodies["/metrics"] = prometheus(4000, 12000, 4000)
    done = trtspec("watch", server.url, "--once", "--baseline", baseline.parent)
    assert done.status == 3 and "acceptance length 2.00; in all 4,000 steps" in done.stdout
    assert "baseline: acceptance length 2.50 (docs)\nfail\n" in done.stdout
    assert "33.3 % fewer accepted drafts per step than docs" in done.stderr


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        (prometheus(120, 360, 180), "120 verification steps are counted, and a verdict needs 500"),
        (prometheus(9000, 9000, names=TRTLLM), "trtllm metrics do not count verification steps"),
        ("sglang:spec_accept_length 2.6\n", "sglang metrics do not count verification steps"),
    ],
)
def test_what_was_not_measured_does_not_pass(
    server: FixedServer, once: Once, body: str, reason: str
) -> None:
    server.bodies["/metrics"] = body
    done, found = once()
    assert (
        done.status == 3
        and not found["ok"]
        and found["status"] == "unmeasured"
        and found["drop"] is None
    )
    assert [problem["code"] for problem in found["problems"]] == ["TS-WATCH-UNMEASURED"]
    assert reason in found["problems"][0]["message"] and "NOT PROVEN" in done.stderr
    assert once("--min-steps", 100)[1]["status"] == ("pass" if "120" in reason else "unmeasured")


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        (None, "not an OpenAI-compatible server"),
        ("hello\n", "is not Prometheus text"),
        ("python_gc_objects_collected_total 3\n", "has no metrics of a server that is known"),
        ("vllm:generation_tokens_total 14\n", "has vllm metrics and none of speculation"),
        (prometheus("NaN", 2700, 1350), "nan, which is not a count"),
        (prometheus(900, -2700, 1350), "-2700, which is not a count"),
        (prometheus(900, 2700, "1e400"), "inf, which is not a count"),
        ("[]", "no iteration yet, or enable_iter_perf_stats is off"),
        ("[1]", "is JSON, but not a list of iterations"),
        ("[{]", "key must be a string"),
        ("[" * 100000, "recursion limit"),
        (iterations((900, -3, 1)), "numDraftTokens -3, which is not a count"),
        (iterations((900, float("nan"), 1)), "numDraftTokens nan, which is not a count"),
        (iterations((None, 2700, 1350)), "numRequestsWithDraftTokens None, which is not a count"),
    ],
)  # fmt: skip
def test_a_server_without_readable_metrics_ends_with_the_reason(
    server: FixedServer, once: Once, body: str | None, reason: str
) -> None:
    server.bodies = {} if body is None else {"/metrics": body}
    for done in (once()[0], trtspec("watch", server.url, "--json")):
        error = json.loads(done.stdout)["error"]
        assert (
            done.status == 1
            and error["code"] == "TS-WATCH-NO-METRICS"
            and reason in error["message"]
        ), error


def test_wrong_usage_names_the_next_command(
    server: FixedServer, once: Once, tmp_path: Path
) -> None:
    done = trtspec("watch", server.url, "--once")
    assert (
        done.status == 2
        and "--baseline is missing" in done.stderr
        and "trtspec bench URL" in done.stderr
    )
    for file, reason in (
        (results(tmp_path / "none.json", turns=False), "no category with 200 verification steps"),
        (results(tmp_path / "zero.json", turns=False, docs=0.0), "no accepted draft in docs"),
        (tmp_path / "missing.json", "there is no such file"),
    ):
        done = trtspec("watch", server.url, "--once", "--baseline", file)
        assert done.status == 2 and reason in done.stderr, done
    done, found = once(url=f"http://127.0.0.1:{free_port()}")
    assert (
        done.status == 1
        and "does not answer: nothing accepts connections" in found["error"]["message"]
    )
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        for listen in ("x", "99999999", f"127.0.0.1:{taken.getsockname()[1]}"):
            done = trtspec("watch", server.url, "--listen", listen)
            assert done.status == 2 and f"--listen {listen}: " in done.stderr, done


@pytest.mark.clock
def test_a_continuous_watch_counts_over_restarts_and_gaps_and_exports_it() -> None:
    ports = free_port(), free_port()
    words = [f"127.0.0.1:{ports[0]}", "--interval", "0.05", "--json", "--listen", str(ports[1])]
    process = subprocess.Popen([*TRTSPEC, "watch", *words], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None

    def until(reached: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
        return next(found for line in process.stdout or () if reached(found := json.loads(line)))

    try:
        assert not until(lambda found: found["missed_scrapes"] == 1)["up"]  # nobody there yet
        server = FixedServer({"/metrics": prometheus(1000, 3000, 1500)}, ports[0])
        first = until(lambda found: found["steps"] == 1000)
        assert first["ok"] and first["acceptance_length"] == 2.5 and first["restarts"] == 0
        assert (
            until(lambda found: found["scrapes"] > first["scrapes"])["acceptance_length"] is None
        )  # nobody asked
        server.bodies["/metrics"] = prometheus(1100, 3300, 1700)
        assert until(lambda found: found["steps"] == 1100)["acceptance_length"] == 3.0
        server.bodies["/metrics"] = prometheus(40, 120, 20)  # started again
        again = until(lambda found: found["restarts"] == 1)
        assert [again[key] for key in ("steps", "accepted", "acceptance_length")] == [
            1140,
            1720,
            1.5,
        ]
        server.bodies["/metrics"] = prometheus("NaN", 120, 20)
        gap = until(lambda found: not found["up"])
        assert (
            not gap["ok"]
            and gap["missed_scrapes"]
            and gap["steps"] == 1140
            and gap["acceptance_length"] is None
        )
        text = httpx.get(f"http://localhost:{ports[1]}/metrics", trust_env=False).text
        shown = {
            s.name: s.value
            for family in text_string_to_metric_families(text)
            for s in family.samples
        }
        exact = {"up": 0, "restarts_total": 1, "steps_total": 1140, "accepted_tokens_total": 1720}
        assert {name: shown.get(f"trtspec_watch_{name}") for name in exact} == exact
        assert (
            shown["trtspec_watch_scrapes_total"] >= 4
            and "trtspec_watch_acceptance_length" not in shown
        )
        server.bodies["/metrics"] = prometheus(90, 270, 80)
        assert until(lambda found: found["up"])["steps"] == 1190
    finally:
        process.send_signal(signal.SIGTERM)
        process.stdout.read()
    assert process.wait(timeout=300) == 0


@pytest.mark.slow
def test_equal_traffic_fails_as_rarely_as_stated(tmp_path: Path) -> None:
    """Of 1,000 servers like their baseline, with clustered answers, 1 % fail within chance.

    No drop is allowed.
    """
    rng, failed = np.random.default_rng(5), 0
    for number in range(1000):
        sides = []
        for count in (40, 200):
            steps, accepted = questions(rng, count)
            turns = [
                TurnCounts(str(i), "c", int(s + a), int(s), int(a), int(3 * s), None, "x")
                for i, (s, a) in enumerate(zip(steps, accepted, strict=True))
            ]
            sides.append(turns)
        baseline = read_baseline(of_turns(tmp_path / f"{number % 2}.json", {"c": sides[0]}))
        live = Watch("u", keeps=("steps", "drafted", "accepted"))
        live.counted = Counters(
            sum(t.steps for t in sides[1]), 0, sum(t.accepted for t in sides[1])
        )
        failed += judge(live, baseline, 0.0, 500).status == "fail"
    print(f"{failed} of 1000 equal servers fail at a stated rate of 1 %")
    assert failed <= 20
