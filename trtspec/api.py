"""The verbs of the Python API. Options have the names, defaults and meanings of the command line's.

Functions that need torch import it when they are called. Problems of what was looked at are in the records; a
TrtspecError is raised for what could not be done.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from trtspec.errors import Problem, UsageError, has_errors

if TYPE_CHECKING:
    from trtspec.cli.convert import Dialect
    from trtspec.planning.decision import Decision
    from trtspec.trtllm.build import EngineConfig

Progress = Callable[[int, int], None]  # gets what is done and what there is to do


@dataclass(frozen=True)
class Inspection:
    """What a checkpoint is. `report` holds the keys of `trtspec inspect --json`, without the problems."""

    kind: Literal["target", "head"]
    family: str | None
    architecture: str | None
    format: str | None
    parameters: int | None
    bytes: int | None
    problems: tuple[Problem, ...]
    report: Mapping[str, Any] = field(repr=False)

    @property
    def ok(self) -> bool:
        return not has_errors(list(self.problems))


@dataclass(frozen=True)
class LintReport:
    """The judgement of one engine YAML for one TensorRT-LLM version, and why that version."""

    version: str
    version_reason: str
    problems: tuple[Problem, ...]

    @property
    def ok(self) -> bool:
        return not has_errors(list(self.problems))


@dataclass(frozen=True)
class QuantizeReport:
    """What was, or with `dry_run` would be, written. `report` holds the keys of `trtspec quantize --json`."""

    output: Path
    quantized: int
    copied: int
    bytes_in: int
    bytes_out: int
    report: Mapping[str, Any] = field(repr=False)


@dataclass(frozen=True)
class ConvertReport:
    """`output` is None where nothing was written: with `dry_run`, or with errors among the problems."""

    output: Path | None
    dialect: str | None
    aux_layers: tuple[int, ...] | None
    problems: tuple[Problem, ...]
    report: Mapping[str, Any] = field(repr=False)

    @property
    def ok(self) -> bool:
        return not has_errors(list(self.problems))


def inspect(
    path: str | Path,
    against: str | Path | None = None,
    *,
    sample: int | None = None,
    modelopt: bool = False,
    hashes: bool = False,
    run: bool = False,
    prompts: str | None = None,
    samples: int = 64,
    draft_len: int = 3,
    seed: int = 0,
    device: str = "cpu",
) -> Inspection:
    """What a target or head is and what is wrong with it; with `against`, also compared with its target or source.
    With `run` a head drafts for its target, and `report["run"]` says what came of it."""
    from trtspec.cli.inspect import InspectOptions, look

    options = InspectOptions(
        path=str(path),
        against=None if against is None else str(against),
        sample=sample,
        modelopt=modelopt,
        hashes=hashes,
        run=run,
        prompts=prompts,
        samples=samples,
        draft_len=draft_len,
        seed=seed,
        device=device,
    )
    found = look(options)
    checkpoint, facts = found.checkpoint, found.checkpoint.facts
    return Inspection(
        kind=checkpoint.kind,
        family=facts.family if facts else None,
        architecture=facts.architecture if facts else None,
        format=facts.format if facts else None,
        parameters=checkpoint.parameters,
        bytes=checkpoint.bytes,
        problems=tuple(found.problems),
        report={key: value for key, value in found.to_dict().items() if key != "problems"},
    )


def lint(
    config: Mapping[str, Any] | str | Path,
    *,
    trtllm_version: str | None = None,
    target: str | None = None,
    head: str | None = None,
    gpu: str | None = None,
    options: Sequence[str] = (),
) -> LintReport:
    """Judges an engine configuration: a mapping, YAML text, or the path of a file. Text has a line break or a colon
    followed by a space; every other string is a path. `options`: of trtllm-serve, used with the file."""
    from trtspec.trtllm.deployment import deployment_of
    from trtspec.trtllm.document import Document
    from trtspec.trtllm.lint import lint as find

    name, document = _document(config, Document)
    deployment, reason, wrong = deployment_of(
        document, version=trtllm_version, target=target, head=head, gpu=gpu, passed=list(options) or None, environ={}
    )
    problems = [*wrong, *(finding.problem(name) for finding in find(document, deployment))]
    return LintReport(deployment.version, reason, tuple(problems))


def _document(config: Mapping[str, Any] | str | Path, document: Any) -> tuple[str, Any]:
    if isinstance(config, Mapping):
        import yaml

        try:
            text = yaml.safe_dump(dict(config), sort_keys=False)
        except yaml.YAMLError as error:
            raise UsageError(f"the configuration cannot be written as YAML: {error}", "use plain values") from None
        return "(dict)", document.parse(text)
    if isinstance(config, str) and ("\n" in config or ": " in config):
        return "(text)", document.parse(config)
    return str(config), document.read(str(config))


def build_config(
    target: str,
    *,
    like: str | None = None,
    head: str | None = None,
    trtllm_version: str = "",
    goal: Literal["latency", "throughput"] = "latency",
    tp_size: int = 4,
    max_batch_size: int | None = None,
    max_num_tokens: int | None = None,
    max_seq_len: int | None = None,
    draft_len: int = 3,
    nodes: int = 1,
    gpu: str | None = None,
    role: Literal["context", "generation"] | None = None,
    ep_size: int | None = None,
    isl: int | None = None,
    osl: int | None = None,
    concurrency: int | None = None,
    attention_dp: bool | None = None,
    settings: Sequence[str] = (),
    trust_remote_code: bool = False,
) -> EngineConfig:
    """The engine YAML (`text`) of one server and the command line that goes with it (`argv`). `settings` are
    KEY=VALUE. Nothing is written."""
    from dataclasses import replace

    from trtspec.checkpoint.hub import load_head, load_target
    from trtspec.trtllm.build import build
    from trtspec.trtllm.deployment import choose_version
    from trtspec.trtllm.intent import Intent

    if head is None and draft_len != 3:
        raise UsageError("draft_len is not used without a head", "name the head")
    intent = Intent(
        target=target, like=like, head=head, version=trtllm_version, goal=goal, tp_size=tp_size,
        max_batch_size=max_batch_size, max_num_tokens=max_num_tokens, max_seq_len=max_seq_len, draft_len=draft_len,
        nodes=nodes, gpu=gpu, role=role, experts_over=ep_size, isl=isl, osl=osl, concurrency=concurrency,
        spread_attention=attention_dp, settings=tuple(settings), trust_remote_code=trust_remote_code,
    )  # fmt: skip
    model = load_target(target, like).spec
    draft = load_head(head).spec if head else None
    version, _ = choose_version(trtllm_version or None)
    return build(replace(intent, version=version).fitted(model.max_position_embeddings), model, draft)


def plan(
    target: str,
    *,
    head: str | None = None,
    gpu: str = "b200",
    gpus: int = 4,
    tp: int | None = None,
    ep: int | None = None,
    attention_dp: bool = False,
    isl: int = 1024,
    osl: int = 1024,
    concurrency: Sequence[int] | None = None,
    acceptance: str | None = None,
    ttft: float | None = None,
    tpot: float | None = None,
    max_draft: int = 8,
    kv_fraction: float | None = None,
    moe_backend: Literal["TRTLLM", "CUTLASS", "DEEPGEMM", "MARLIN"] | None = None,
) -> Decision:
    """Whether a target fits, how fast it runs and which settings serve it best: ranked rows, the best one, and why a
    layout is refused."""
    from trtspec.checkpoint.hub import load_head, load_target
    from trtspec.cli.options import IntList
    from trtspec.cli.plan import PlanOptions, planned
    from trtspec.records import parsed

    if acceptance is not None and head is None:
        raise UsageError("acceptance is not used without a head", "name the head")
    levels = None if concurrency is None else parsed(IntList, ",".join(map(str, concurrency)), "concurrency")
    options = PlanOptions(
        target=target, head=head, gpu=gpu, gpus=gpus, tp=tp, ep=ep, attention_dp=attention_dp, isl=isl, osl=osl,
        concurrency=levels, acceptance=acceptance, ttft=ttft, tpot=tpot, max_draft=max_draft, kv_fraction=kv_fraction,
        moe_backend=moe_backend,
    )  # fmt: skip
    return planned(options, load_target(target).spec, load_head(head).spec if head else None)[0]


def quantize(
    source: str | Path,
    output: str | Path,
    *,
    policy: str | None = None,
    kv_cache: Literal["fp8", "none"] = "fp8",
    input_scales: str | Path = "one",
    accept_input_scales: bool = False,
    weight_scales: Literal["max", "mse"] | None = None,
    workers: int = 0,
    device: str = "cpu",
    dry_run: bool = False,
    restart: bool = False,
    force: bool = False,
    progress: Progress | None = None,
) -> QuantizeReport:
    """Converts a BF16, FP8 or INT4 Kimi checkpoint to NVFP4 with the streaming engine; resumes an interrupted run."""
    from trtspec.cli.quantize import QuantizeOptions, run
    from trtspec.quant.run import to_json

    options = QuantizeOptions(
        source=str(source), output=Path(output), policy=policy, kv_cache=kv_cache, input_scales=str(input_scales),
        accept_input_scales=accept_input_scales,
        weight_scales=weight_scales, workers=workers, device=device, dry_run=dry_run, restart=restart, force=force,
    )  # fmt: skip
    found = run(options, progress)
    return QuantizeReport(
        Path(found.output), found.quantized, found.copied, found.bytes_in, found.bytes_out, report=to_json(found)
    )


def convert(
    head: str | Path,
    output: str | Path,
    to: Dialect,
    *,
    from_: Dialect | None = None,
    target: str | Path | None = None,
    lm_head: Literal["auto", "keep", "drop", "target"] = "auto",
    embed_tokens: Literal["auto", "keep", "drop", "target"] = "auto",
    rope_theta: float | None = None,
    dry_run: bool = False,
    force: bool = False,
    progress: Progress | None = None,
) -> ConvertReport:
    """Rewrites an Eagle3 head in another project's layout. Where that would lose something, nothing is written and the
    problems say what."""
    from trtspec.cli.convert import ConvertOptions, run

    options = ConvertOptions(
        head=str(head), output=Path(output), to=to, from_=from_, target=None if target is None else str(target),
        lm_head=lm_head, embed_tokens=embed_tokens, rope_theta=rope_theta, dry_run=dry_run, force=force,
    )  # fmt: skip
    done = run(options, progress)
    return ConvertReport(
        output=done.output,
        dialect=done.to,
        aux_layers=done.head.aux_layers if done.head else None,
        problems=tuple(done.problems),
        report={key: value for key, value in done.to_json().items() if key != "problems"},
    )
