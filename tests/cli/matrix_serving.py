"""Matrix rows of the commands around an engine: an effect of each option by mode.

A new option is a word in the `effects(...)` of each mode that takes it; its value must change what
the run leaves:

    SIZED = effects("--gpu b300 --isl 300 --json")

An option that needs more than a word is an `Effect`, and a new mode is a `Situation`.
"""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from tests.bench.test_statistics import run_of
from tests.cli.matrix import Effect, Situation, effects
from tests.cli.matrix_making import a_file, journal, line
from trtspec.bench.statistics import summarize

TARGET, HEAD = "nvidia/Kimi-K2.5-NVFP4", "nvidia/Kimi-K2.5-Eagle3"
PLAN = ("plan", TARGET, "--head", HEAD)
SIZED = effects(
    "--gpu b300 --gpus 8 --attention-dp --isl 300 --osl 300 --concurrency 2 --ttft 900 --tpot 20 "
    "--kv-fraction 0.5 --json",
    target=Effect(instead=line("plan nvidia/Kimi-K2.6-NVFP4")),
    head=Effect(instead=("plan", TARGET, "--head", "nvidia/Kimi-K2-Thinking-Eagle3")),
    tp_size="--tp 4",
    ep_size="--ep 1",
)
SERVER = ("build-config", TARGET)
TRUST = "--trust-remote-code"  # what a pod needs
CHART = (*SERVER, "--format", "helm-values", TRUST)
DYNAMO = (*SERVER, *line(f"--format dynamo --trtllm-version 1.3.0rc11 {TRUST}"))
FRONT = (*SERVER, *line("--role front --context-url a:1 --generation-url b:1"))
PARTS = (*SERVER, "--disaggregated", "{out}")
CHART_PARTS = (*CHART, "--disaggregated", "{out}")
DYNAMO_PARTS = (*PARTS, *DYNAMO[2:])
WITH_HEAD = effects(
    "--goal throughput --tp-size 8 --max-batch-size 7 --max-num-tokens 9000 --max-seq-len 4096 "
    "--nodes 2 --gpu b300 --concurrency 9 --trust-remote-code --json",
    head=f"--head {HEAD}",
    version="--trtllm-version 1.2.1",
    experts_over="--ep-size 4",
    spread_attention="--attention-dp",
    settings="--set print_iter_log=true",
)


def intent(
    base: tuple[str, ...], *, to: str = "-o {out}", before: Any = a_file, **more: Effect | str
) -> dict[str, Effect]:
    """The options of an intent in one form, and those of its file."""
    form, place = base[2:], line(to)
    written = base if set(place) <= set(base) else (*base, *place)
    if TRUST in base:
        more["trust_remote_code"] = Effect(instead=tuple(word for word in base if word != TRUST))
    return WITH_HEAD | effects(
        target=Effect(instead=("build-config", "nvidia/Kimi-K2.6-NVFP4", *form)),
        like=Effect(line(f"--like {TARGET}"), base=("build-config", "/made/later", *form)),
        isl=Effect(line("--isl 64"), base=(*base, "--osl", "64")),
        osl=Effect(line("--osl 64"), base=(*base, "--isl", "64")),
        draft_len=Effect(
            line("--draft-len 2"), base=(*base, "--head", "lightseekorg/kimi-k2.5-eagle3")
        ),
        dry_run=Effect(line("--dry-run"), base=written),
        force=Effect(line("--force"), base=written, before=before),
        **more,
    )


ENGINE_FILE = f"""speculative_config:
  decoding_type: Eagle
  max_draft_len: 3
  speculative_model_dir: {HEAD}
"""


def a_vllm_file(out: Path) -> None:
    out.with_suffix(".yml").write_text("max-num-seqs: 5\nenforce-eager: true\n")


def an_engine_file(out: Path) -> None:
    out.write_text(ENGINE_FILE)


LINT = line("lint {engine} --trtllm-version 1.3.0rc20")
ENGINE = ("serve", TARGET, *line("--dry-run --trtllm-version 1.3.0rc20"))
PODS = (*ENGINE, *line("--launcher lws --nodes 1"))
FORWARD = ("serve", TARGET, *line("--disaggregated {front} --dry-run"))
VLLM = ("serve", TARGET, *line("--backend vllm --dry-run"))
MLA = "lightseekorg/kimi-k2.5-eagle3-mla"
REFERENCE = line("serve {target} --backend reference --dry-run")
TIMES = effects(
    startup_timeout=Effect(line("--startup-timeout 5"), launches=True),
    stop_grace=Effect(line("--stop-grace 5"), launches=True),
    hung_after=Effect(line("--hung-after 5"), launches=True),
)

ADDRESS = effects("--host 0.0.0.0 --port 8123 --json")
SIZES = effects(
    "--max-batch-size 7 --max-num-tokens 9000 --max-seq-len 256 --served-model-name kimi"
)

WATCH = line("watch {url}")
ONCE = line("watch {url} --once --baseline {out}.json")


def accepting(out: Path) -> None:
    """A results.json that a watch can judge by."""
    run = run_of(np.random.default_rng(0), [str(number) for number in range(60)], np.zeros(60), 0.0)
    for suffix, name in ((".json", "code"), (".2", "docs")):
        turns = [replace(turn, category=name) for turn in run.turns_detail]
        named = replace(run, turns_detail=turns, categories={name: summarize(turns)})
        out.with_suffix(suffix).write_text(json.dumps(named.to_dict()))


PUBLISHED = ("prove", TARGET, "--head", HEAD, "--dry-run")
PROVE = line("prove {target} --head {head} --backend reference -o {out}")


SERVING: dict[str, dict[str, Situation]] = {
    "prove": {
        "": Situation(
            PROVE,
            effects(
                "--head {mla} --output {out}.2 --backend vllm --gpu b300 --gpus 8 --draft-len 5 "
                "--dataset {questions} --samples 4 --max-tokens 32 --concurrency 2 "
                "--accept-unmeasured sampled --port 8999 --launches 2 --startup-timeout 5 "
                "--dry-run --json",
                target=Effect(
                    instead=line("prove {other} --head {head} --backend reference -o {out}")
                ),
                passed=Effect(line("-- --dtype float32")),
                card=Effect(line("--card"), base=PUBLISHED),
                thinking=Effect(line("--thinking off"), base=PUBLISHED),
                accept_slower=Effect(line("--accept-slower"), base=PUBLISHED),
            ),
        ),
    },
    "watch": {
        "--once": Situation(
            ONCE,
            effects(
                "--baseline {out}.2 --max-drop 0.05 --min-steps 2000 --json",
                url=Effect(
                    instead=("watch", "{nowhere}", *ONCE[2:], "--json"), base=(*ONCE, "--json")
                ),
            ),
            before=accepting,
        ),
        "a continuous watch": Situation(
            WATCH,
            effects(
                "--interval 30 --listen 9777 --json",
                url=Effect(instead=line("watch {nowhere}")),
            ),
        ),
    },
    "plan": {
        "a plan with a head": Situation(PLAN, SIZED | effects("--acceptance 2.6@3 --max-draft 2")),
        "a plan without a head": Situation(
            ("plan", TARGET), SIZED | effects(head=f"--head {HEAD}")
        ),
    },
    "lint": {
        "an engine file of TensorRT-LLM": Situation(
            LINT,
            effects(
                (
                    "--trtllm-version 1.2.1 --target nvidia/Kimi-K2.5-NVFP4 --installed --diff "
                    "--strict --json"
                ),
                files=Effect(instead=line("lint {recipe} --trtllm-version 1.3.0rc20")),
                head=Effect(
                    line("--head nvidia/Kimi-K2.6-Eagle3"), base=(*LINT, "--target", TARGET)
                ),
                gpu=Effect(line("--gpu h100"), base=(*LINT, "--target", TARGET)),
                fix=Effect(
                    line("--fix"),
                    base=line("lint {out} --trtllm-version 1.3.0rc20"),
                    before=an_engine_file,
                ),
            ),
        )
    },
    "serve": {
        "the TensorRT-LLM engine": Situation(
            ENGINE,
            TIMES
            | ADDRESS
            | SIZES
            | effects(
                "--config {engine} --trtllm-version 1.2.1 --goal throughput --tp-size 8 "
                "--trust-remote-code --launcher lws --role context",
                target=Effect(
                    instead=line(
                        "serve nvidia/Kimi-K2.6-NVFP4 --dry-run --trtllm-version 1.3.0rc20"
                    )
                ),
                passed=Effect(line("-- --log_level info")),
                head=f"--head {HEAD}",
                draft_len=Effect(line("--draft-len 2"), base=(*ENGINE, "--head", HEAD)),
                nodes=Effect(line("--nodes 2"), base=PODS),
                gpus_per_node=Effect(line("--gpus-per-node 1"), base=PODS),
                launcher_args=Effect(("--launcher-args=--mem=0",), base=PODS),
                dry_run=Effect(
                    line("--dry-run"), base=("serve", TARGET, "--trtllm-version", "1.3.0rc20")
                ),
            ),
        ),
        "the front of a disaggregated deployment": Situation(
            FORWARD,
            TIMES
            | effects(
                target=Effect(
                    instead=line("serve nvidia/Kimi-K2.6-NVFP4 --disaggregated {front} --dry-run")
                ),
                disaggregated=Effect(
                    instead=("serve", TARGET, *line("--disaggregated {engine} --dry-run"))
                ),
                json_="--json",
            ),
        ),
        "vLLM": Situation(
            VLLM,
            TIMES
            | ADDRESS
            | SIZES
            | effects(
                "--vllm-version 0.17.0 --dtype float32 --tp-size 4 --trust-remote-code",
                target=Effect(instead=("serve", "nvidia/Kimi-K2.6-NVFP4", *VLLM[2:])),
                passed=Effect(line("-- --enforce-eager")),
                head=f"--head {MLA}",
                config=Effect(line("--config {out}.yml"), before=a_vllm_file),
                draft_len=Effect(line("--draft-len 2"), base=(*VLLM, "--head", MLA)),
                draft_sampling=Effect(
                    line("--draft-sampling probabilistic"), base=(*VLLM, "--head", MLA)
                ),
                api_key=Effect(line("--api-key sesame"), base=(*VLLM, "--json")),
                dry_run=Effect(line("--dry-run"), base=VLLM[:-1]),
            ),
        ),
        "the reference backend": Situation(
            REFERENCE,
            ADDRESS
            | SIZES
            | effects(
                (
                    "--head {head} --dtype float32 --device cuda --prefix-cache-mib 7 "
                    "--max-queue 7 --api-key sesame"
                ),
                target=Effect(instead=line("serve {other} --backend reference --dry-run")),
                draft_len=Effect(line("--draft-len 2"), base=(*REFERENCE, "--head", "{head}")),
                draft_sampling=Effect(
                    line("--draft-sampling probabilistic"), base=(*REFERENCE, "--head", "{head}")
                ),
                dry_run=Effect(instead=line("serve {target} --backend reference")),
            ),
        ),
    },
    "build-config": {
        "a server": Situation(SERVER, intent(SERVER, output="--output {out}")),
        "--format helm-values": Situation(
            CHART,
            intent(
                CHART, output="--output {out}", quantize_from="--quantize-from moonshotai/Kimi-K2.6"
            ),
        ),
        "--role front": Situation(
            FRONT,
            effects(
                "--output {out} --json",
                version="--trtllm-version 1.2.1",
                context_urls="--context-url c:1",
                generation_urls="--generation-url d:1",
                target=Effect(instead=("build-config", "{missing}", *FRONT[2:])),
                dry_run=Effect(line("--dry-run"), base=(*FRONT, "-o", "{out}")),
                force=Effect(line("--force"), base=(*FRONT, "-o", "{out}"), before=a_file),
            ),
        ),
        "--disaggregated": Situation(
            PARTS,
            intent(
                PARTS,
                to="--disaggregated {out}",
                before=journal("{out}/front.yml"),
                context_urls="--context-url c:1",
                generation_urls="--generation-url d:1",
            ),
        ),
        "--disaggregated for the chart": Situation(
            CHART_PARTS,
            intent(
                CHART_PARTS,
                to="--disaggregated {out}",
                before=journal("{out}/values.yaml"),
                quantize_from="--quantize-from moonshotai/Kimi-K2.6",
            ),
        ),
        "--format dynamo": Situation(
            DYNAMO, intent(DYNAMO, output="--output {out}", image="--image registry/engine:1")
        ),
        "--disaggregated for Dynamo": Situation(
            DYNAMO_PARTS,
            intent(
                DYNAMO_PARTS,
                to="--disaggregated {out}",
                before=journal("{out}/dynamo.yml"),
                image="--image registry/engine:1",
            ),
        ),
    },
}
