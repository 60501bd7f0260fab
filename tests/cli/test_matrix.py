"""Every option of every command in every mode is honoured, seen in what the run leaves, or refused by its flag; every
environment variable works or is noted. The table is complete by test: an option without a row fails."""

from __future__ import annotations

import dataclasses
import json
import shutil
import typing
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import typer

from tests.cli.matrix import Effect, Recorder, Situation, Stage, effects
from tests.command_line import trtspec
from tests.tiny import make_head, make_target
from trtspec.cli.app import COMMANDS
from trtspec.records import Mode, click_command, flag_of, variable

NAMES = [name for names in COMMANDS.values() for name in names]


def journal(name: str) -> Any:
    """An interrupted run of this kind lies beside, or in, the output."""

    def write(out: Path) -> None:
        path = out.parent / name.format(out=out.name)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()

    return write


def occupied(out: Path) -> None:
    out.mkdir()
    (out / "config.json").write_text("{}")


def a_file(out: Path) -> None:
    out.write_text("mine")


def finished_parts(out: Path) -> None:
    shutil.copytree(out.parent.parent / "parts", out)


def line(text: str) -> tuple[str, ...]:
    return tuple(text.split())


QUANTIZE, DRY = line("quantize {target} -o {out}"), line("--dry-run --json")
BYTES = effects(
    source=Effect(instead=line("quantize {other} -o {out}")),
    output=Effect(instead=line("quantize {target} -o {out}-2")),
    policy="--policy k2.6",
    kv_cache="--kv-cache none",
    input_scales="--input-scales {data}",
    json_="--json",
)
RUNS = effects(
    restart=Effect(line("--restart"), base=(*QUANTIZE, *DRY), before=journal("{out}/.trtspec-quantize.jsonl")),
    force=Effect(line("--force"), base=(*QUANTIZE, *DRY), before=occupied),
)
STREAM = BYTES | RUNS | effects(
    weight_scales="--weight-scales mse",
    workers=Effect(line("--workers 2"), base=(*QUANTIZE, *DRY)),
    device="--device cuda:7",
    dry_run="--dry-run",
)  # fmt: skip
PART_BASE = (*QUANTIZE, "--shard", "0/2")
MODELOPT_RUN = (*QUANTIZE, "--engine", "modelopt")
MODELOPT_BASE = (*MODELOPT_RUN, "--dry-run")
TRAIN = line("train {target} {data} -o {out}")
RECIPE = effects(
    attention="--attention mha",
    eagle="--eagle 3.1",
    draft_vocab_size="--draft-vocab-size 64",
    intermediate_size="--intermediate-size 96",
    aux_layers="--aux-layers 1,2,3",
    ttt_steps="--ttt-steps 2",
    epochs="--epochs 2",
    steps="--steps 5",
    lr="--lr 0.001",
    seq_len="--seq-len 16",
    batch_size="--batch-size 2",
    seed="--seed 3",
    answer_only="--answer-only",
    init="--init {head}",
    config="--config {recipe}",
    save_every="--save-every 7",
    device="--device cuda",
    acceptance_prompts="--acceptance-prompts 3",
)


def train_effects(*mode: str, **more: Effect | str) -> dict[str, Effect]:
    base = (*TRAIN, *mode)
    own = effects(
        target=Effect(instead=(*line("train {other} {data} -o {out}"), *mode)),
        data=Effect(instead=(*line("train {target} {answers} -o {out}"), *mode)),
        output=Effect(instead=(*line("train {target} {data} -o {out}-2"), *mode)),
        restart=Effect(line("--restart"), base=base, before=journal("{out}/.trtspec/state")),
        force=Effect(line("--force"), base=base, before=occupied),
        **more,
    )
    return RECIPE | own


SYNTHESIZE = line("synthesize {prompts} -o {out} --base-url {url}/v1 --samples 3")
BENCH = line("bench {url} --samples 2 --concurrency 1 --max-tokens 8")
CHECK = line("check {url} --samples 3 --max-tokens 8")
CHECKED = effects(
    record="--record {out}",
    min_acceptance="--min-acceptance 9",
    concurrency="--concurrency 1",
    model="--model other",
    force=Effect(line("--force"), base=(*CHECK, "--record", "{out}"), before=a_file),
    json_="--json",
)
PROMPTS = effects(dataset="--dataset {data}", samples="--samples 2", max_tokens="--max-tokens 4")

TABLE: dict[str, dict[str, Situation]] = {
    "doctor": {"": Situation(("doctor",), effects(json_="--json"))},
    "demo": {
        "": Situation(
            line("demo -o {out} --port {port}"),
            effects(
                output=Effect(instead=line("demo -o {out}-2 --port {port}")),
                port="--port {taken}",
                quick="--quick",
                force=Effect(line("--force"), before=journal("{out}/logs/01.out")),
            ),
        )
    },
    "inspect": {
        "`inspect TARGET`": Situation(
            line("inspect {target}"), effects(path=Effect(instead=line("inspect {other}")), json_="--json")
        ),
        "`inspect HEAD`": Situation(
            line("inspect {head}"),
            effects(
                path=Effect(instead=line("inspect {mla}")),
                sample=Effect(line("--sample 0"), base=line("inspect {broken}")),
                json_="--json",
            ),
        ),
        "`inspect HEAD --against ...`": Situation(
            line("inspect {head} --against {target}"),
            effects(
                path=Effect(instead=line("inspect {mla} --against {target}")),
                against=Effect(instead=line("inspect {head} --against {wide}")),
                sample=Effect(line("--sample 0"), base=line("inspect {broken} --against {target}")),
                json_="--json",
            ),
        ),
        "`inspect TARGET --against SOURCE`": Situation(
            line("inspect {nvfp4} --against {target}"),
            effects(
                path=Effect(instead=line("inspect {other} --against {target}")),
                against=Effect(instead=line("inspect {nvfp4} --against {other}")),
                sample="--sample 3",
                modelopt=Effect(line("--modelopt"), slow=True),
                json_="--json",
            ),
        ),
    },
    "quantize": {
        "the streaming engine": Situation(QUANTIZE, STREAM, cheap=line("quantize {missing} -o {out}")),
        "--shard": Situation(
            PART_BASE,
            STREAM | effects(
                shard=Effect(instead=(*QUANTIZE, "--shard", "1/2")),
                source=Effect(instead=line("quantize {other} -o {out} --shard 0/2")),
                output=Effect(instead=line("quantize {target} -o {out}-2 --shard 0/2")),
                restart=Effect(line("--restart"), base=(*PART_BASE, *DRY),
                               before=journal("{out}/.trtspec-quantize.0-of-2.jsonl")),
                force=Effect(line("--force"), base=(*PART_BASE, *DRY), before=occupied),
                workers=Effect(line("--workers 2"), base=(*PART_BASE, *DRY)),
            ),
            cheap=line("quantize {missing} -o {out} --shard 0/2"),
        ),
        "--merge": Situation(
            (*QUANTIZE, "--merge"),
            BYTES | effects(
                weight_scales="--weight-scales mse",
                source=Effect(instead=line("quantize {other} -o {out} --merge")),
                output=Effect(instead=line("quantize {target} -o {out}-2 --merge")),
            ),
            cheap=line("quantize {missing} -o {out} --merge"),
            before=finished_parts,
        ),
        "--engine modelopt": Situation(
            MODELOPT_BASE,
            BYTES | effects(
                source=Effect(instead=line("quantize {other} -o {out} --engine modelopt --dry-run")),
                output=Effect(instead=line("quantize {target} -o {out}-2 --engine modelopt --dry-run")),
                kv_cache=Effect(line("--kv-cache none"), base=MODELOPT_RUN, slow=True),
                dry_run=Effect(line("--dry-run"), base=MODELOPT_RUN, slow=True),
                restart=Effect(line("--restart"), before=journal("{out}/.trtspec-quantize.jsonl")),
                force=Effect(line("--force"), before=occupied),
            ),
            cheap=line("quantize {missing} -o {out} --engine modelopt"),
        ),
    },
    "calibrate": {
        "": Situation(
            line("calibrate {target} {data} -o {out} --dry-run"),
            effects(
                source=Effect(instead=line("calibrate {other} {data} -o {out} --dry-run")),
                data=Effect(instead=line("calibrate {target} {answers} -o {out} --dry-run")),
                output=Effect(instead=line("calibrate {target} {data} -o {out}-2 --dry-run")),
                samples="--samples 3",
                seq_len="--seq-len 4",
                policy="--policy k2.6",
                device="--device cuda",
                dtype="--dtype float32",
                states_memory="--states-memory 0",
                load_ahead="--one-layer",
                dry_run=Effect(line("--dry-run"), base=line("calibrate {target} {data} -o {out}"), slow=True),
                restart=Effect(line("--restart"), base=line("calibrate {target} {data} -o {out} --dry-run --json"),
                               before=journal(".{out}.calibrate/journal.jsonl")),
                force=Effect(line("--force"), before=a_file),
                json_="--json",
            ),
        )
    },
    "synthesize": {
        "": Situation(
            SYNTHESIZE,
            effects(
                prompts=Effect(instead=line("synthesize {answers} -o {out} --base-url {url}/v1 --samples 3")),
                output=Effect(instead=line("synthesize {prompts} -o {out}-2 --base-url {url}/v1 --samples 3")),
                base_url="--base-url {url}/v2",
                model="--model other",
                api_key="--api-key secret",
                concurrency="--concurrency 1",
                split=Effect(line("--split test"), base=line("synthesize nobody/no-such-set -o {out}"), slow=True),
                samples="--samples 2",
                max_tokens="--max-tokens 4",
                temperature="--temperature 0.5",
                top_p="--top-p 0.5",
                thinking="--thinking drop",
                raw="--raw",
                extra_body=Effect(("--extra-body", '{{"top_k": 3}}')),
                shard="--shard 0/2",
                timeout=Effect(line("--timeout 5"), base=(*SYNTHESIZE, "--dry-run")),
                dry_run="--dry-run",
                restart=Effect(line("--restart"), base=(*SYNTHESIZE, "--dry-run"), before=journal(".{out}.journal")),
                force=Effect(line("--force"), before=a_file),
                json_="--json",
            ),
        )
    },
    "train": {
        "--dry-run": Situation(
            (*TRAIN, "--dry-run"),
            train_effects(
                "--dry-run", features="--features stream", gpu="--gpu h200",
                json_=Effect(instead=(*TRAIN, "--json")),
            ),
        ),
        "a training run": Situation(TRAIN, train_effects(features="--features memory", json_="--json")),
        "--features stream or URL": Situation(
            (*TRAIN, "--features", "stream"),
            {
                name: effect
                for name, effect in train_effects(
                    "--features", "stream", features="--features {url}", json_="--json"
                ).items()
                if name != "acceptance_prompts"
            },
        ),
    },
    "convert": {
        "": Situation(
            line("convert {head} -o {out} --to vllm"),
            effects(
                head=Effect(instead=line("convert {mla} -o {out} --to vllm")),
                output=Effect(instead=line("convert {head} -o {out}-2 --to vllm")),
                to="--to sglang",
                from_="--from speculators",
                target="--target {target}",
                lm_head="--lm-head drop",
                embed_tokens=Effect(
                    line("--embed-tokens target"), base=line("convert {head} -o {out} --to vllm --target {target}")
                ),
                rope_theta="--rope-theta 12345",
                dry_run="--dry-run",
                force=Effect(line("--force"), before=occupied),
                json_="--json",
            ),
        )
    },
    "bench": {
        "": Situation(
            BENCH,
            effects(
                url=Effect(instead=line("bench {nowhere} --samples 2 --concurrency 1 --max-tokens 8")),
                output="--output {out}",
                dataset="--dataset {data}",
                samples="--samples 3",
                concurrency="--concurrency 2",
                max_tokens="--max-tokens 4",
                temperature="--temperature 0.5",
                seed="--seed 9",
                against_url="--against-url plain={url}",
                rounds=Effect(line("--rounds 2"), base=(*BENCH, "--json")),
                compare="--compare {results}",
                api="--api completions",
                model="--model other",
                extra_body=Effect(("--extra-body", '{{"top_k": 3}}')),
                force=Effect(line("--force"), base=(*BENCH, "-o", "{out}"), before=occupied),
                json_="--json",
            ),
            floats=False,
        )
    },
    "check": {
        "`check` without --against": Situation(
            CHECK,
            CHECKED | PROMPTS | effects(url=Effect(instead=line("check {nowhere} --samples 3 --max-tokens 8"))),
            cheap=line("check {nowhere}"),
        ),
        "--against URL": Situation(
            (*CHECK, "--against", "{url}"),
            CHECKED | PROMPTS | effects(
                url=Effect(instead=line("check {nowhere} --against {url}")),
                against=Effect(instead=(*CHECK, "--against", "{nowhere}")),
                near_tie="--near-tie 0",
            ),
            cheap=line("check {nowhere} --against {url}"),
        ),
        "--against FILE": Situation(
            line("check {url} --against {recording}"),
            CHECKED | effects(
                url=Effect(instead=line("check {nowhere} --against {recording}")),
                against=Effect(instead=line("check {url} --against {shorter}")),
                near_tie="--near-tie 0",
                force=Effect(
                    line("--force"), base=line("check {url} --against {recording} --record {out}"), before=a_file
                ),
            ),
            cheap=line("check {nowhere} --against {recording}"),
        ),
    },
}  # fmt: skip
# what chooses the mode, in the words of each situation
SELECTING = {
    "quantize": {"engine", "shard", "merge"},
    "train": {"dry_run"},
    "check": {"against"},
    "inspect": {"against"},
}


def record_of(command: str) -> type:
    module = command.replace("-", "_")
    function = getattr(import_module(f"trtspec.cli.{module}"), module)
    hints = typing.get_type_hints(function)
    return next(hint for name, hint in hints.items() if name != "return")


def modes_of(command: str) -> list[Mode]:
    """The modes of a command; one with all options where it declares none."""
    declared = getattr(import_module(f"trtspec.cli.{command.replace('-', '_')}"), "MODES", None)
    return list(declared or [Mode("", record_of(command), "")])


def fields_of(record: type) -> list[str]:
    return [field.name for field in dataclasses.fields(record)]  # type: ignore[arg-type]


def is_record(command: str) -> bool:
    return dataclasses.is_dataclass(record_of(command))


COVERED = [name for name in NAMES if is_record(name)]


def row(command: str, mode: Mode, name: str) -> Effect | None:
    situation = TABLE.get(command, {}).get(mode.name)
    return situation.effects.get(name) if situation else None


def is_slow(command: str, mode: Mode, name: str) -> bool:
    found = row(command, mode, name)
    return found is not None and found.slow


USED = [
    pytest.param(command, mode, name, id=f"{command}-{mode.name}-{name}",
                 marks=[pytest.mark.slow] * is_slow(command, mode, name))
    for command in COVERED
    for mode in modes_of(command)
    for name in fields_of(mode.record)
    if row(command, mode, name) or name not in SELECTING.get(command, ())
]  # fmt: skip
UNUSED = [
    pytest.param(command, mode, name, id=f"{command}-{mode.name}-{name}")
    for command in COVERED
    for mode in modes_of(command)
    for name in fields_of(record_of(command))
    if name not in fields_of(mode.record) and name not in SELECTING.get(command, ())
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
    places["broken"] = make_head(room / "broken", places["target"], draft_vocab=128)
    places |= {name: room / name for name in ("missing", "nvfp4", "parts", "results", "recording", "shorter")}
    rows = [f"what is {word}" for word in ("red", "green", "blue", "yellow", "white", "black", "brown", "pink", "grey")]
    turns = [[{"role": "user", "content": row}, {"role": "assistant", "content": f"{row} indeed"}] for row in rows]
    kept = [{"conversation_id": str(n), "conversations": turn, "messages": turn[:1]} for n, turn in enumerate(turns)]
    for name, count in (("data", 9), ("answers", 6)):
        places[name] = room / f"{name}.jsonl"
        places[name].write_text("".join(json.dumps(conversation) + "\n" for conversation in kept[:count]))
    places["prompts"] = room / "prompts.txt"
    places["prompts"].write_text("\n".join(rows))
    places["recipe"] = room / "recipe.yaml"
    places["recipe"].write_text("seed: 11\n")
    found = Stage({name: str(path) for name, path in places.items()}, room / "run" / "out", server)
    found.places |= {"nowhere": "http://127.0.0.1:9", "port": "47310", "taken": str(server.server_port)}
    for words in (
        ["quantize", places["target"], "-o", places["nvfp4"]],
        ["quantize", places["target"], "-o", places["parts"], "--shard", "0/2"],
        ["quantize", places["target"], "-o", places["parts"], "--shard", "1/2"],
        ["bench", server.url, "--samples", 2, "--concurrency", 1, "--max-tokens", 8, "-o", room / "bench"],
        ["check", server.url, "--samples", 3, "--max-tokens", 8, "--record", places["recording"]],
        ["check", server.url, "--samples", 2, "--max-tokens", 8, "--record", places["shorter"]],
    ):
        done = trtspec(*words)
        assert done.status in (0, 3), done.stderr
    shutil.copy(room / "bench" / "results.json", places["results"])
    hide_a_nan(places["broken"])
    yield found
    server.shutdown()


def hide_a_nan(head: Path) -> None:
    """In a place that samples of the values miss."""
    import torch
    from safetensors.torch import load_file, save_file

    tensors = load_file(head / "model.safetensors")
    tensors["fc.weight"].view(-1)[1000] = torch.nan
    save_file(tensors, head / "model.safetensors", {"format": "pt"})


@pytest.fixture(autouse=True)
def long_runs_are_handed_on(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    """Training and the demo take minutes: what they would begin with is kept instead, as a record."""
    finished = {"parameters": 1, "training": {"steps": 1, "tokens_seen": 1, "seconds": 1.0, "accuracy": [0.5]}}

    def train(run: Any, options: Any) -> dict[str, Any]:
        stage.handed.append(repr((run, options)))
        return finished

    monkeypatch.setattr("trtspec.cli.train._train", train)
    monkeypatch.setattr("trtspec.cli.demo_stages.run_stages", lambda demo: stage.handed.append(repr(demo.sizes)))
    monkeypatch.setattr("trtspec.cli.demo.finish", lambda output, data: None)
    for name, size in {"WHOLE": 1024, "PIECE": 16, "PIECES": 8}.items():  # so that values of a tiny head are sampled
        monkeypatch.setattr(f"trtspec.checkpoint.heads.values.{name}", size)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")


_SEEN: dict[Any, dict[str, Any]] = {}


def seen(stage: Stage, words: tuple[str, ...], situation: Situation, effect: Effect) -> dict[str, Any]:
    before = effect.before or situation.before
    key = (words, before, situation.floats)
    if key not in _SEEN:
        _SEEN[key] = stage.see(words, before, situation.floats)
    return _SEEN[key]


@pytest.mark.parametrize("command", COVERED)
def test_the_table_names_every_mode_and_every_option(command: str) -> None:
    table = TABLE.get(command, {})
    assert list(table) == [mode.name for mode in modes_of(command)]
    for mode in modes_of(command):
        wanted = set(fields_of(mode.record)) - SELECTING.get(command, set())
        assert wanted <= set(table[mode.name].effects), f"{command}, {mode.name}: no row for an option"


@pytest.mark.parametrize(("command", "mode", "name"), USED)
def test_an_option_of_the_mode_changes_what_is_seen(stage: Stage, command: str, mode: Mode, name: str) -> None:
    situation = TABLE[command][mode.name]
    effect = situation.effects[name]
    base = effect.base or situation.base
    words = effect.instead or (*base, *effect.words)
    plain, changed = seen(stage, base, situation, effect), seen(stage, words, situation, effect)
    assert plain != changed, f"{' '.join(words)} leaves what {' '.join(base)} leaves"


@pytest.mark.parametrize("command", COVERED)
def test_the_same_words_leave_the_same(stage: Stage, command: str) -> None:
    """So that a difference is the option's."""
    for situation in TABLE[command].values():
        first = stage.see(situation.base, situation.before, situation.floats)
        assert first == stage.see(situation.base, situation.before, situation.floats), situation.base


def sample_of(command: str, name: str) -> tuple[str, ...]:
    """Words that set the option, from a mode that uses it."""
    flag = flag_of(record_of(command), name)
    lines = [s.effects[name].words for s in TABLE[command].values() if name in s.effects]
    return next(words for words in lines if flag in words or words[0].startswith("--"))


@pytest.mark.parametrize(("command", "mode", "name"), UNUSED)
def test_an_option_of_another_mode_is_refused_by_its_flag(stage: Stage, command: str, mode: Mode, name: str) -> None:
    situation = TABLE[command][mode.name]
    words = (*(situation.cheap or situation.base), *sample_of(command, name))
    found = stage.see(words, situation.before, situation.floats)
    assert found["status"] == 2, found
    assert f"{flag_of(record_of(command), name)} is not used" in found["stderr"]


@pytest.mark.parametrize(("command", "mode", "name"), UNUSED)
def test_a_variable_of_another_mode_is_noted(stage: Stage, command: str, mode: Mode, name: str) -> None:
    situation = TABLE[command][mode.name]
    flag, words = flag_of(record_of(command), name), sample_of(command, name)
    (value,) = stage.words(words[1:]) if len(words) > 1 else ("1",)
    base = situation.cheap or situation.base
    plain = stage.see(base, situation.before, situation.floats)
    found = stage.see(base, situation.before, situation.floats, **{variable(command, flag): value})
    assert f"note: {variable(command, flag)} is not used" in found["stderr"]
    assert found["status"] == plain["status"]


def options_of(command: str) -> list[str]:
    hints = typing.get_type_hints(record_of(command), include_extras=True)
    return [
        name
        for name, hint in hints.items()
        if any(isinstance(part, typer.models.OptionInfo) for part in hint.__metadata__)
    ]


@pytest.mark.parametrize("command", COVERED)
def test_every_variable_sets_what_its_flag_sets(stage: Stage, command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    record, kept = record_of(command), []
    run = click_command(command, record, kept.append)
    for name in options_of(command):
        flag = flag_of(record, name)
        lines = [s.effects[name].words for s in TABLE[command].values() if name in s.effects]
        lines = [words for words in lines if words and words[0].startswith(("--", "-o"))]
        if not lines:  # required, or what selects the mode
            continue
        words = stage.words(lines[0])[:2]
        needed = required(command, stage, besides=flag)
        run.main([*needed, *words], standalone_mode=False)
        off = words[0] != flag and len(words) == 1
        with monkeypatch.context() as patch:
            patch.setenv(variable(command, flag), words[1] if len(words) > 1 else "0" if off else "1")
            run.main(needed, standalone_mode=False)
        assert kept[-1] == kept[-2], flag
        assert getattr(kept[-1], name) != default_of(record, name), flag


def required(command: str, stage: Stage, besides: str) -> list[str]:
    """The words that every line of the command needs."""
    words = {"quantize": "{target} -o x", "calibrate": "{target} {data} -o x", "synthesize": "{prompts} -o x",
             "train": "{target} {data} -o x", "convert": "{head} -o x --to vllm", "bench": "{url}", "check": "{url}",
             "inspect": "{target}"}  # fmt: skip
    found = stage.words(tuple(words.get(command, "").split()))
    if besides in found:
        del found[found.index(besides) : found.index(besides) + 2]
    return found


def default_of(record: type, name: str) -> Any:
    return next(field.default for field in dataclasses.fields(record) if field.name == name)  # type: ignore[arg-type]
