"""Every option of every command in every mode is honoured, or refused by its flag.

What the run leaves shows it. Every environment variable works or is noted. The table is complete by
test: an option without a row fails. matrix_making.py and matrix_serving.py say how to add one.
"""

import shutil
from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from tests.cli.matrix import Effect, Recorder, Situation, Stage, conversations
from tests.cli.matrix_making import MAKING
from tests.cli.matrix_serving import SERVING, an_engine_file
from tests.command_line import succeeded, trtspec
from tests.json_files import read_json, write_json, write_lines
from tests.tiny import make_head, make_target, read_tensors, write_tensors
from trtspec import records
from trtspec.cli.app import COMMANDS
from trtspec.errors import CheckFailed
from trtspec.records import Modes, click_command, variable

NAMES = [name for names in COMMANDS.values() for name in names]


TABLE: dict[str, dict[str, Situation]] = MAKING | SERVING
# what chooses the mode, in the words of each situation
SELECTING = {
    "plan": {"head"},
    "build-config": {"role", "disaggregated", "format"},
    "serve": {"backend", "disaggregated", "dry_run", "json_"},
    "quantize": {"engine"},
    "train": {"dry_run"},
    "check": {"score"},
    "inspect": {"against"},
    "watch": {"once"},
}


def fields_of(command: str) -> dict[str, records.OptionField]:
    """The fields of the command's record by name."""
    return records.fields_of(record_of(command))


def record_of(command: str) -> type:
    module = command.replace("-", "_")
    return records.record_of(getattr(import_module(f"trtspec.cli.{module}"), module))


def declared_modes(command: str) -> set[str]:
    """Names of the modes that the record's metadata speaks of."""
    rules = [rule for field in fields_of(command).values() for rule in field.rules]
    return {mode.name for rule in rules if isinstance(rule, Modes) for mode in rule.modes}


NOTHING = (
    "acceptance_length_interval", "conditional", "per_question_mean", "surplus",
)  # fmt: skip
# 10 % below the baseline of the table
WATCHED = {"steps": 1000, "draft_tokens": 3000, "accepted_tokens": 1350}


CLOCKS = ("timeout", "wait_ready", "concurrency")  # whose effect a clock or an overlap shows
# an option that has a row in a situation is honoured there, and every other option of the command
# is refused
USED = [
    pytest.param(
        command,
        mode,
        name,
        id=f"{command}-{mode}-{name}",
        marks=[pytest.mark.slow] * effect.slow + [pytest.mark.clock] * (name in CLOCKS),
    )
    for command in NAMES
    for mode, situation in TABLE.get(command, {}).items()
    for name, effect in sorted(situation.effects.items())
]
UNUSED = [
    pytest.param(command, mode, name, id=f"{command}-{mode}-{name}")
    for command in NAMES
    for mode, situation in TABLE.get(command, {}).items()
    for name in fields_of(command)
    if name not in situation.effects and name not in SELECTING.get(command, ())
]


@pytest.fixture(scope="module")
def stage(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stage]:
    room = tmp_path_factory.mktemp("matrix")
    server = Recorder()
    places = {
        "target": make_target(room / "Kimi-K2.5", layers=7, shards=4),
        "other": make_target(room / "Kimi-K2.6", layers=8, seed=1),
        "wide": make_target(room / "Kimi-wide", layers=7, hidden=128),
    }
    places["head"] = make_head(room / "head", places["target"], draft_vocab=128)
    places["mla"] = make_head(room / "mla", places["target"], attention="mla", draft_vocab=128)
    places["hidden"] = make_target(room / "hidden", layers=5, hidden=128, shards=1)
    places["broken"] = make_head(room / "broken", places["target"], draft_vocab=128)
    fresh = ("missing", "nvfp4", "results", "recording", "shorter", "bench")
    places |= {name: room / name for name in fresh}
    colours = "red green blue yellow white black brown pink grey"
    rows = [f"what is {colour}" for colour in colours.split()]
    asked = [{"prompt": f"why {number}", "id": number} for number in range(24)]
    lines = {
        "data": conversations(rows),
        "answers": conversations(rows[:6]),
        "prompts": [{"prompt": row} for row in rows],
        "questions": asked,
    }
    places |= {name: write_lines(room / f"{name}.jsonl", rows) for name, rows in lines.items()}
    places |= {name: room / name for name in ("recipe.yaml", "engine.yml", "front.yml")}
    places = {Path(name).stem: path for name, path in places.items()}
    places["recipe"].write_text("seed: 11\n")
    an_engine_file(places["engine"])
    found = Stage({name: str(path) for name, path in places.items()}, room / "run" / "out", server)
    # below the ports that the system gives to outgoing connections of other tests
    found.places |= {
        "nowhere": "http://127.0.0.1:9",
        "port": "21310",
        "taken": str(server.server_port),
    }
    front = (
        "build-config nvidia/Kimi-K2.5-NVFP4 --role front --context-url=127.0.0.1:{taken} "
        "--generation-url=localhost:{taken}"
    )
    places["front"].write_text(succeeded(*found.line(front)).stdout)
    short = "check {url} --max-tokens 8 --context-tokens 8 --tokenizer kimi-nano"
    for line in (
        "quantize {target} -o {nvfp4}",
        "bench {url} --samples 3 --concurrency 1 --max-tokens 8 -o {bench}",
        f"{short} --samples 3 --record {{recording}}",
        f"{short} --samples 2 --record {{shorter}}",
    ):
        done = trtspec(*found.line(line))
        assert done.status in (0, 3), done
    shutil.copy(places["bench"] / "results.json", places["results"])
    found.places["drafted"] = str(room / "drafted.json")
    write_json(Path(found.places["drafted"]), drafting(read_json(places["results"])))
    hide_a_nan(places["broken"], "fc.weight")
    hide_a_nan(places["hidden"], "language_model.lm_head.weight")
    yield found
    server.shutdown()


def drafting(results: dict[str, Any]) -> dict[str, Any]:
    """Results as of a server with three drafts: each step accepts one, and answers took a while."""
    told = dict.fromkeys(("turns", "questions"), 2) | dict.fromkeys(("steps", "accepted"), 100)
    told |= {"tokens": 200, "drafted": 300, "acceptance_length": 2.0}
    told |= {"histogram": [0, 100, 0, 0], "cumulative": [1.0, 0.0, 0.0]}
    results |= told
    results["categories"] = {"code": dict.fromkeys(NOTHING) | told | {"source": "counters"}}
    for level in results["concurrency"]:
        level |= told
    for question in results["questions_detail"]:
        question["seconds"] = 0.3
    return results


def hide_a_nan(checkpoint: Path, name: str) -> None:
    """In a place that samples of the values miss."""
    import torch

    tensors = read_tensors(checkpoint)
    tensors[name].view(-1)[1000] = torch.nan
    write_tensors(checkpoint, tensors)


@pytest.fixture(autouse=True)
def long_runs_are_handed_on(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    """Training and the demo take minutes, so their starting values are kept as a record instead."""
    finished = {
        "parameters": 1,
        "training": {"steps": 1, "tokens_seen": 1, "seconds": 1.0, "accuracy": [0.5]},
    }

    def handing(answer: Any) -> Callable[..., Any]:
        """Keeps its arguments and returns the answer, or raises it."""

        def hand(*given: Any) -> Any:
            stage.handed.append(repr(given))
            if isinstance(answer, Exception):
                raise answer
            return answer

        return hand

    async def watch_on(*given: Any) -> None:  # until a signal
        stage.handed.append(repr(given))

    async def read(watch: Any, client: Any) -> None:
        counters = [f"trtspec_spec_decode_{name}_total {n}" for name, n in WATCHED.items()]
        watch.take("\n".join(counters) + "\n")

    def launch(plan: Any) -> int:
        stage.handed.append(repr(plan.limits))
        return 0

    def all_stages(demo: Any) -> None:
        stage.handed.append(repr((demo.directory, demo.port)))
        demo.evidence = {"sentence": "", "ok": True}

    for function, replacement in {
        "verbs.train.train_and_measure": handing(finished), "launch.preflight.launch": launch,
        "verbs.serve.serve_reference": handing(None),
        "cli.watch._watch_on": watch_on, "bench.watch.Watch.read": read,
        "bench.prove.prove": handing(CheckFailed("begun")), "cli.demo.Demo.all_stages": all_stages,
    }.items():  # fmt: skip
        monkeypatch.setattr(f"trtspec.{function}", replacement)
    # so that values of a tiny head are sampled
    for name, size in {"WHOLE_BYTES": 1024, "CHUNK_BYTES": 16, "SAMPLED_CHUNKS": 8}.items():
        monkeypatch.setattr(f"trtspec.checkpoint.values.{name}", size)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")


_SEEN: dict[Any, dict[str, Any]] = {}


def seen(
    stage: Stage, words: tuple[str, ...], situation: Situation, effect: Effect
) -> dict[str, Any]:
    before = effect.before or situation.before
    key = (words, before, situation.floats)
    if key not in _SEEN:
        _SEEN[key] = stage.see(words, before, situation.floats)
    return _SEEN[key]


@pytest.mark.parametrize("command", NAMES)
def test_the_table_names_every_mode_and_every_option(command: str) -> None:
    table = TABLE[command]
    assert declared_modes(command) <= set(table)
    shown = {name for situation in table.values() for name in situation.effects}
    options = set(fields_of(command))
    assert shown <= options <= shown | SELECTING.get(command, set()), "no row for an option"


@pytest.mark.parametrize(("command", "mode", "name"), USED)
def test_an_option_of_the_mode_changes_what_is_seen(
    stage: Stage, command: str, mode: str, name: str
) -> None:
    situation = TABLE[command][mode]
    effect = situation.effects[name]
    base = effect.base or situation.base
    if effect.launches:
        base = tuple(word for word in base if word != "--dry-run")
    words = effect.instead or (*base, *effect.words)
    plain, changed = seen(stage, base, situation, effect), seen(stage, words, situation, effect)
    assert plain != changed, f"{' '.join(words)} leaves what {' '.join(base)} leaves"


@pytest.mark.parametrize("command", NAMES)
def test_the_same_words_leave_the_same(stage: Stage, command: str) -> None:
    """So that a difference is the option's."""
    for situation in TABLE[command].values():
        first = seen(stage, situation.base, situation, Effect())
        assert first == stage.see(situation.base, situation.before, situation.floats), (
            situation.base
        )


def sample_of(command: str, name: str) -> tuple[str, ...]:
    """Words that set the option, from a mode that uses it."""
    flag = fields_of(command)[name].typed
    lines = lines_of(command, name)
    return next(words for words in lines if flag in words or words[0].startswith("--"))


def lines_of(command: str, name: str) -> list[tuple[str, ...]]:
    """The words of the option's row in each mode that has one."""
    return [s.effects[name].words for s in TABLE[command].values() if name in s.effects]


@pytest.mark.parametrize(("command", "mode", "name"), UNUSED)
def test_an_option_of_another_mode_is_refused_by_its_flag(
    stage: Stage, command: str, mode: str, name: str
) -> None:
    situation = TABLE[command][mode]
    words = (*(situation.cheap or situation.base), *sample_of(command, name))
    found = stage.see(words, situation.before, situation.floats)
    assert found["status"] == 2, found
    assert (
        f"{fields_of(command)[name].typed} is not used" in found["stderr"]
        and "\n-> " in found["stderr"]
    )


@pytest.mark.parametrize(
    ("command", "mode", "name"), [case for case in UNUSED if case.values[2] != "passed"]
)
def test_a_variable_of_another_mode_is_noted(
    stage: Stage, command: str, mode: str, name: str
) -> None:
    situation = TABLE[command][mode]
    field = fields_of(command)[name]
    if field.is_argument:
        pytest.skip("an argument has no variable")
    flag, value = field.typed, value_in(stage.words(sample_of(command, name)))
    base = situation.cheap or situation.base
    plain = seen(stage, base, situation, Effect())
    found = stage.see(base, situation.before, situation.floats, **{variable(command, flag): value})
    assert f"note: {variable(command, flag)} is not used" in found["stderr"]
    assert found["status"] == plain["status"]


def value_in(words: list[str]) -> str:
    """As a variable holds it: of `--flag value`, `--flag=value` or a switch."""
    return words[1] if len(words) > 1 else words[0].partition("=")[2] or "1"


@pytest.mark.parametrize("command", NAMES)
def test_every_variable_sets_what_its_flag_sets(
    stage: Stage, command: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept: list[Any] = []
    run = click_command(command, record_of(command), kept.append)
    for name, field in fields_of(command).items():
        flag = field.typed
        lines = [
            line for line in lines_of(command, name) if line and line[0].startswith(("--", "-o"))
        ]
        if field.is_argument or not lines:  # required, or what selects the mode
            continue
        words = stage.words(lines[0])
        words = words[:1] if "=" in words[0] else words[:2]
        needed = required(command, stage, besides=flag)
        run.main([*needed, *words], standalone_mode=False)
        off = words[0].partition("=")[0] != flag and len(words) == 1
        with monkeypatch.context() as patch:
            patch.setenv(variable(command, flag), "0" if off else value_in(words))
            run.main(needed, standalone_mode=False)
        assert kept[-1] == kept[-2], flag
        assert getattr(kept[-1], name) != field.default, flag


def required(command: str, stage: Stage, besides: str) -> list[str]:
    """The words that every line of the command needs."""
    words = {
        "quantize": "{target} -o x",
        "calibrate": "{target} {data} -o x",
        "synthesize": "{prompts} -o x",
        "train": "{target} {data} -o x",
        "convert": "{head} -o x --to vllm",
        "bench": "{url}",
        "check": "{url}",
        "explain": "TS-PAIR-WIDTH",
        "inspect": "{target}",
        "plan": "{target}",
        "build-config": "{target}",
        "lint": "{engine}",
        "serve": "{target}",
        "prove": "{target} --head {head}",
        "watch": "{url}",
    }
    found = stage.words(tuple(words.get(command, "").split()))
    if besides in found:
        del found[found.index(besides) : found.index(besides) + 2]
    return found
