"""`trtspec synthesize`: the target writes the answers that a head is trained on."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from trtspec.cli.options import JsonObject
from trtspec.errors import TrtspecError
from trtspec.records import DryRunOption, Excludes, ForceOption, JsonOption, Needs, RestartOption, checked, refuse_empty
from trtspec.report import file_sha256, print_json, progress_bar, provenance, refuse_overwrite, say, write_json

if TYPE_CHECKING:
    from trtspec.heads.synthesis import AnswerSampling, Outcome, Prompt, TargetEndpoint

REASONS = ("empty", "noise", "loop", "cut off")


@dataclass(frozen=True, kw_only=True)
class SynthesizeOptions:
    prompts: Annotated[
        str,
        typer.Argument(
            help="Prompts: jsonl, json, parquet or text, a directory of these, or a hub data set org/name[:config]."
        ),
    ]
    output: Annotated[Path, typer.Option("--output", "-o", help="Data set to write (jsonl).")]
    base_url: Annotated[str, typer.Option(help="OpenAI-compatible endpoint of the target, with or without /v1.")] = (
        "http://127.0.0.1:8000"
    )
    model: Annotated[str | None, typer.Option(help="Model name.", show_default="the first one the server lists")] = None
    api_key: Annotated[str, typer.Option(help="Bearer token; OPENAI_API_KEY is read too.", envvar="OPENAI_API_KEY")] = (
        "none"
    )
    concurrency: Annotated[int, typer.Option(min=1, help="Maximum number of requests in flight.")] = 16
    split: Annotated[
        str | None,
        typer.Option(help="Split of a hub data set, or several: a,b,c give equal shares.", show_default="train"),
        Needs("from_hub", where="by prompts that are no hub data set"),
    ] = None
    samples: Annotated[int, typer.Option(min=0, help="Use only the first N prompts; 0 uses all.")] = 0
    max_tokens: Annotated[int, typer.Option(min=1, help="Maximum tokens per answer.")] = 512
    temperature: Annotated[float, typer.Option(min=0.0, help="Sampling temperature; use your production value.")] = 1.0
    top_p: Annotated[float, typer.Option(min=0.0, max=1.0, help="Nucleus sampling probability.")] = 1.0
    thinking: Annotated[
        Literal["keep", "drop"],
        typer.Option(help="Whether the reasoning before each answer goes into the data set."),
        Excludes("raw", why="which has no chat template"),
    ] = "keep"
    raw: Annotated[
        bool, typer.Option("--raw", help="Send prompts to /completions as plain text, without the chat template.")
    ] = False
    extra_body: Annotated[
        JsonObject, typer.Option(help="JSON object merged into every request, of keys that no option sets.")
    ] = JsonObject("{}", {})
    shard: Annotated[
        str | None, typer.Option(help="i/n: process only part i of n, to share the work among machines.")
    ] = None
    timeout: Annotated[float, typer.Option(min=1.0, help="Seconds to wait for one request.")] = 600.0
    dry_run: DryRunOption = False
    restart: RestartOption = False
    force: ForceOption = False
    json_: JsonOption = False

    @property
    def from_hub(self) -> bool:
        from trtspec.checkpoint.rows import from_hub

        return from_hub(self.prompts)


def synthesize(options: SynthesizeOptions) -> None:
    """Generate training data: send prompts to the target through its OpenAI-compatible endpoint.

    The seed of each prompt follows from its text. Run an interrupted command again to resume it;
    finished answers are not requested again. Prompts that fail are listed and left out, and the exit status is 1.
    """
    from trtspec.heads.synthesis import AnswerSampling, TargetEndpoint, read_prompts, shard

    refuse_empty(options)
    options = checked(options)
    endpoint = TargetEndpoint(options.base_url, options.api_key, options.concurrency, options.timeout)
    sampling = AnswerSampling(
        options.model,
        options.max_tokens,
        options.temperature,
        options.top_p,
        options.raw,
        options.extra_body.value,
        options.thinking,
    )
    chosen = shard(read_prompts(options.prompts, options.split, options.samples), options.shard)
    output = options.output
    journal = output.with_name(f".{output.name}.journal")
    resumes = journal.exists() and not options.restart
    if not resumes:
        refuse_overwrite(output, options.force)
    if options.dry_run:
        print_json(_plan(options, len(chosen), sampling, resumes))
        return
    if options.restart:
        journal.unlink(missing_ok=True)
    outcome = _answer(chosen, output, endpoint, sampling, journal)
    quality, bad = judge_answers(outcome.rows)
    summary = _summary(outcome, output, len(chosen)) | {"quality": quality}
    _record(options, chosen, sampling, summary | {"degenerate_rows": bad})
    if options.json_:
        print_json(summary | {"errors": outcome.failed})
    else:
        print(f"{output}: {outcome.answered} answered now, {outcome.resumed} before, {len(outcome.failed)} failed")
        _warn(quality)
    _raise_failed(outcome, len(chosen))
    journal.unlink(missing_ok=True)


def _plan(options: SynthesizeOptions, prompts: int, sampling: AnswerSampling, resumes: bool) -> dict[str, Any]:
    """What --dry-run answers; the key itself is never shown."""
    return {
        "prompts": prompts,
        "output": str(options.output),
        "most_tokens": prompts * options.max_tokens,
        "endpoint": options.base_url,
        "api_key": "not set" if options.api_key == "none" else "set",
        "concurrency": options.concurrency,
        "timeout": options.timeout,
        "sampling": sampling.__dict__,
        "resumes": resumes,
        "dry_run": True,
    }


def _record(
    options: SynthesizeOptions, chosen: list[Prompt], sampling: AnswerSampling, summary: dict[str, Any]
) -> None:
    """The data set's provenance, beside it."""
    digest = _digest(options.prompts, chosen)
    source = {"prompts": Path(options.prompts).name, "prompts_sha256": digest, "endpoint": options.base_url}
    used = {"sampling": sampling.__dict__, "split": options.split, "samples": options.samples, "shard": options.shard}
    path = options.output.with_name(f"{options.output.name}.provenance.json")
    write_json(path, provenance("synthesize", source, used, **summary))


def _answer(
    chosen: list[Prompt], output: Path, endpoint: TargetEndpoint, sampling: AnswerSampling, journal: Path
) -> Outcome:
    from trtspec.heads.synthesis import synthesize as answer

    tokens = 0
    with progress_bar("answers", len(chosen), "prompts") as bar:

        def on_answer(count: int) -> None:
            nonlocal tokens
            tokens += count
            bar.advance(1, f"{tokens:,} tokens")

        return answer(
            chosen, output, endpoint, sampling, journal_path=journal, on_answer=on_answer,
            on_resumed=lambda count: bar.advance(count, f"{count} were answered before" if count else ""),
        )  # fmt: skip


def _summary(outcome: Outcome, output: Path, prompts: int) -> dict[str, Any]:
    return {
        "output": str(output),
        "prompts": prompts,
        "answered": outcome.answered,
        "resumed": outcome.resumed,
        "failed": len(outcome.failed),
        "completion_tokens": outcome.tokens,
        "seconds": round(outcome.seconds, 2),
    }


def judge_answers(rows: list[dict[str, Any]]) -> tuple[dict[str, int], dict[str, str]]:
    """(counts of what a head should not learn much of, the reason by row): answers that are empty, noise or a loop, or
    that the token limit cut off."""
    from trtspec.client.text_quality import degeneration

    found = {}
    for row in rows:
        last = row["conversations"][-1] if "conversations" in row else {"content": row["completion"]}
        text = last.get("reasoning_content", "") + last["content"]
        reason = None if last.get("tool_calls") and not text else degeneration(text)
        if reason or row.get("finish_reason") == "length":
            found[row["conversation_id"]] = reason or "cut off"
    reasons = list(found.values())
    return {"answers": len(rows)} | {name: reasons.count(name) for name in REASONS}, found


def _warn(quality: dict[str, int]) -> None:
    bad = {name: quality[name] for name in REASONS if quality[name]}
    if bad:
        counts = ", ".join(f"{count} {name}" for name, count in bad.items())
        advice = "; raise --max-tokens" if bad.get("cut off") else ""
        say(f"Of {quality['answers']} answers {counts} (by row in the provenance file){advice}")


def _digest(source: str, chosen: list[Prompt]) -> str:
    """Of the file; of the prompts' ids where they come from a directory or a hub data set."""
    if Path(source).is_file():
        return file_sha256(Path(source))
    return hashlib.sha256("".join(prompt.id for prompt in chosen).encode()).hexdigest()


def _raise_failed(outcome: Outcome, prompts: int) -> None:
    if outcome.failed:
        name, reason = next(iter(outcome.failed.items()))
        raise TrtspecError(
            f"TS-SYNTH-FAILED {len(outcome.failed)} of {prompts} prompts have no answer; {name}: {reason}",
            "run the same command again to ask only these",
        )
