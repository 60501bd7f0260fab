"""Matrix rows of the commands that make, train and measure: an effect of each option by mode.

A new option is a word in the `effects(...)` of each mode that takes it; its value must change what
the run leaves:

    SIZED = effects("--gpu b300 --isl 300 --json")

An option that needs more than a word is an `Effect`, and a new mode is a `Situation`.
"""

from pathlib import Path
from typing import Any

from tests.cli.matrix import Effect, Situation, effects, slowly
from tests.json_files import edit_json
from trtspec.data_files import kimi_nano_dir
from trtspec.models.precision import has_native_bf16

NANO = str(kimi_nano_dir())
# not what `auto` takes on this machine
UNUSUAL_DTYPE, PRECISION = ("float32", "fp32") if has_native_bf16() else ("bfloat16", "bf16")


def journal(name: str) -> Any:
    """An interrupted run of this kind lies beside, or in, the output."""

    def write(out: Path) -> None:
        path = out.parent / name.format(out=out.name)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()

    return write


def left_by(command: str) -> Any:
    """An earlier run of the command left its output."""

    def write(out: Path) -> None:
        out.mkdir()
        edit_json(out / "provenance.json", command=command)

    return write


def begun(out: Path) -> None:
    out.mkdir()
    (out / "answers.jsonl").touch()


def a_file(out: Path) -> None:
    out.write_text("mine")


def line(text: str) -> tuple[str, ...]:
    return tuple(text.split())


QUANTIZE, DRY = line("quantize {target} -o {out}"), line("--dry-run --json")
BYTES = effects(
    "--policy k2.6 --kv-cache none --input-scales {data} --json",
    source=Effect(instead=line("quantize {other} -o {out}")),
    output=Effect(instead=line("quantize {target} -o {out}-2")),
)
RUNS = effects(
    restart=Effect(
        line("--restart"), base=(*QUANTIZE, *DRY), before=journal("{out}/.trtspec-quantize.jsonl")
    ),
    force=Effect(line("--force"), base=(*QUANTIZE, *DRY), before=left_by("quantize")),
)
STREAM = BYTES | RUNS | effects(
    "--weight-scales mse --device cuda:7 --dry-run",
    workers=Effect(line("--workers 7"), base=(*QUANTIZE, *DRY)),
)  # fmt: skip
TRAIN = line("train {target} {data} -o {out}")
RECIPE = effects(
    "--attention mha --eagle 3.1 --draft-vocab-size 64 --intermediate-size 96 --aux-layers 1,2,3 "
    "--ttt-steps 2 --epochs 2 --steps 5 --lr 0.001 --seq-len 18 --batch-size 2 --ttt-decay 0.8 "
    "--accumulation 2 --schedule constant --warmup 0.1 --weight-decay 0.1 --grad-clip 0.5 "
    f"--precision {PRECISION} --held-out 0.3 --eval-every 3 --max-time 5 --seed 3 "
    "--answer-only --init {head} --config {recipe} --save-every 7 --device cuda "
    "--acceptance-prompts 3"
)


def train_effects(*mode: str, **more: Effect | str) -> dict[str, Effect]:
    base = (*TRAIN, *mode)
    own = effects(
        target=Effect(instead=(*line("train {other} {data} -o {out}"), *mode)),
        data=Effect(instead=(*line("train {target} {answers} -o {out}"), *mode)),
        output=Effect(instead=(*line("train {target} {data} -o {out}-2"), *mode)),
        restart=Effect(line("--restart"), base=base, before=journal("{out}/.trtspec-train.jsonl")),
        force=Effect(line("--force"), base=base, before=left_by("train")),
        **more,
    )
    return RECIPE | own


ASKED = line("synthesize {prompts} -o {out} --base-url {url}/v1 --samples 3")
SYNTHESIZE = (*ASKED, "--extra-body", '{{"delay": 2}}')  # until two are asked at once
BENCH = line("bench {url} --samples 3 --concurrency 1 --max-tokens 8")
DRAFTING = (*BENCH, "--extra-body", '{{"drafts": 3}}')
SLOWLY = (
    *line("bench {url} --samples 1 --warmup 0 --concurrency 1 --max-tokens 8"),
    "--extra-body",
    '{{"delay": 0.4}}',
)
CHECK = line("check {url} --samples 2 --max-tokens 8 --context-tokens 8 --tokenizer kimi-nano")
SCORED = line("check {url} --score {recording} --tokenizer kimi-nano")
CHECKED = effects(
    "--record {out} --accept-unmeasured answers --timeout 0.001 --model other "
    "--tokenizer {missing} --json",
    concurrency=Effect(line("--concurrency 1"), base=(*CHECK, "--samples", "6")),
    min_acceptance=Effect(line("--min-acceptance 9"), base=(*CHECK, "--samples", "6")),
)
LOOK = effects("--hashes --json")
MAKING: dict[str, dict[str, Situation]] = {
    "explain": {
        "": Situation(
            ("explain", "TS-PAIR-WIDTH"),
            effects(
                code=Effect(instead=("explain", "TS-PAIR-VOCAB")),
                json_="--json",
            ),
        )
    },
    "doctor": {"": Situation(("doctor",), effects(json_="--json"))},
    "demo": {
        "": Situation(
            line("demo -o {out} --port {port}"),
            effects(
                output=Effect(instead=line("demo -o {out}-2 --port {port}")),
                port="--port {taken}",
                force=Effect(line("--force"), before=journal("{out}/logs/01.out")),
            ),
        )
    },
    "inspect": {
        "`inspect TARGET`": Situation(
            line("inspect {target}"),
            LOOK
            | effects(
                path=Effect(instead=line("inspect {other}")),
                sample=Effect(line("--sample 0"), base=line("inspect {hidden}")),
            ),
        ),
        "`inspect HEAD`": Situation(
            line("inspect {head}"),
            LOOK
            | effects(
                path=Effect(instead=line("inspect {mla}")),
                sample=Effect(line("--sample 0"), base=line("inspect {broken}")),
            ),
        ),
        "`inspect HEAD --against ...`": Situation(
            line("inspect {head} --against {target}"),
            LOOK
            | effects(
                path=Effect(instead=line("inspect {mla} --against {target}")),
                against=Effect(instead=line("inspect {head} --against {wide}")),
                sample=Effect(line("--sample 0"), base=line("inspect {broken} --against {target}")),
            ),
        ),
        "`inspect TARGET --against SOURCE`": Situation(
            line("inspect {nvfp4} --against {target}"),
            LOOK
            | effects(
                path=Effect(instead=line("inspect {other} --against {target}")),
                against=Effect(instead=line("inspect {nvfp4} --against {other}")),
                sample="--sample 3",
            ),
        ),
    },
    "quantize": {
        "": Situation(QUANTIZE, STREAM, cheap=line("quantize {missing} -o {out}")),
    },
    "calibrate": {
        "": Situation(
            line("calibrate {target} {data} -o {out} --dry-run"),
            effects(
                "--samples 3 --seq-len 4 --policy k2.6 --device cuda --json",
                source=Effect(instead=line("calibrate {other} {data} -o {out} --dry-run")),
                data=Effect(instead=line("calibrate {target} {answers} -o {out} --dry-run")),
                output=Effect(instead=line("calibrate {target} {data} -o {out}-2 --dry-run")),
                dtype=f"--dtype {UNUSUAL_DTYPE}",
                dry_run=Effect(
                    line("--dry-run"), base=line("calibrate {target} {data} -o {out}"), slow=True
                ),
                restart=Effect(
                    line("--restart"),
                    base=line("calibrate {target} {data} -o {out} --dry-run --json"),
                    before=journal(".{out}.calibrate/.trtspec-calibrate.jsonl"),
                ),
                force=Effect(line("--force"), before=a_file),
            ),
        )
    },
    "synthesize": {
        "": Situation(
            SYNTHESIZE,
            effects(
                "--base-url {url}/v2 --model other --api-key secret --concurrency 1 --samples 2 "
                "--max-tokens 4 --temperature 0.5 --top-p 0.5 --shard 0/2 --dry-run --json",
                prompts=Effect(
                    instead=line("synthesize {answers} -o {out} --base-url {url}/v1 --samples 3")
                ),
                output=Effect(
                    instead=line("synthesize {prompts} -o {out}-2 --base-url {url}/v1 --samples 3")
                ),
                split=Effect(
                    line("--split test"),
                    base=line("synthesize nobody/no-such-set -o {out}"),
                    slow=True,
                ),
                extra_body=Effect(instead=(*ASKED, "--extra-body", '{{"top_k": 3}}')),
                timeout=Effect(line("--timeout 5"), base=(*SYNTHESIZE, "--dry-run")),
                wait_ready=Effect(
                    line("--wait-ready 0.1"),
                    base=line("synthesize {prompts} -o {out} --base-url {nowhere}"),
                    slow=True,
                ),
                restart=Effect(
                    line("--restart"),
                    base=(*SYNTHESIZE, "--dry-run"),
                    before=journal(".{out}.synthesize/.trtspec-synthesize.jsonl"),
                ),
                force=Effect(line("--force"), before=a_file),
            ),
        )
    },
    "train": {
        "--dry-run": Situation(
            (*TRAIN, *DRY),
            train_effects(
                *DRY,
                features="--features stream",
                gpu="--gpu h200",
                json_=Effect(line("--json"), base=(*TRAIN, "--dry-run")),
            ),
        ),
        "a training run": Situation(
            TRAIN, train_effects(features="--features memory", json_="--json")
        ),
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
                "--to sglang --target {target} --rope-theta 12345 --dry-run --json",
                head=Effect(instead=line("convert {mla} -o {out} --to vllm")),
                output=Effect(instead=line("convert {head} -o {out}-2 --to vllm")),
                from_="--from speculators",
                embed_tokens=Effect(
                    line("--embed-tokens target"),
                    base=line("convert {head} -o {out} --to vllm --target {target}"),
                ),
                force=Effect(line("--force"), before=left_by("convert")),
            ),
        )
    },
    "bench": {
        "": Situation(
            BENCH,
            effects(
                "--output {out} --dataset {data} --samples 4 --concurrency 2 --max-tokens 4 "
                "--temperature 0.5 --seed 9 --against-url plain={url} --compare {results} "
                "--model other --thinking off --warmup 3 --system Short --recorded-times --json",
                url=Effect(
                    instead=line("bench {nowhere} --samples 2 --concurrency 1 --max-tokens 8")
                ),
                rounds=Effect(line("--rounds 2"), base=(*BENCH, "--json")),
                extra_body=Effect(("--extra-body", '{{"top_k": 3}}')),
                card=Effect(
                    line("--card nvidia/Kimi-K2.5-Eagle3"),
                    base=(*BENCH, "--dataset", "mt-bench={data}", "--json"),
                ),
                rate=Effect(line("--rate 50"), base=line("bench {url} --samples 2 --max-tokens 8")),
                max_regression=Effect(
                    line("--max-regression 0.05"), base=(*BENCH, "--compare", "{drafted}")
                ),
                choose_draft=Effect(line("--choose-draft"), base=DRAFTING),
                timeout=Effect(line("--timeout 0.2"), base=SLOWLY),
                wait_ready=Effect(
                    line("--wait-ready 0.1"),
                    base=line("bench {nowhere} --samples 2 --concurrency 1 --max-tokens 8"),
                ),
                resume=Effect(line("--resume"), base=(*BENCH, "-o", "{out}"), before=begun),
                force=Effect(line("--force"), base=(*BENCH, "-o", "{out}"), before=begun),
            ),
            floats=False,
        )
    },
    "check": {
        "`check` without --score": Situation(
            CHECK,
            CHECKED
            | effects(
                "--against {url} --dataset {data} --samples 1 --max-tokens 9 --context-tokens 40",
                url=Effect(instead=line("check {nowhere} --tokenizer kimi-nano")),
                wait_ready=Effect(
                    line("--wait-ready 0.1"), base=line("check {nowhere} --tokenizer kimi-nano")
                ),
                exact=Effect(line("--exact"), base=(*CHECK, "--against", "{url}")),
                force=Effect(line("--force"), base=(*CHECK, "--record", "{out}"), before=a_file),
            ),
            cheap=line("check {nowhere}"),
        ),
        "--score": Situation(
            SCORED,
            slowly(
                CHECKED
                | effects(
                    "--concurrency 1 --exact",
                    force=Effect(
                        line("--force"), base=(*SCORED, "--record", "{out}"), before=a_file
                    ),
                )
            )
            | effects(
                "--score {shorter}",
                url=Effect(
                    instead=line("check {nowhere} --score {recording} --tokenizer kimi-nano")
                ),
                wait_ready=Effect(
                    line("--wait-ready 0.1"),
                    base=line("check {nowhere} --score {recording} --tokenizer kimi-nano"),
                ),
            ),
            cheap=line("check {nowhere} --score {recording}"),
        ),
    },
}
