"""`trtspec synthesize`: the target writes the answers that a head is trained on."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from trtspec.cli.options import DryRunOption, ForceOption, JsonOption
from trtspec.cli.values import json_object
from trtspec.errors import TrtspecError
from trtspec.report import file_sha256, print_json, provenance, refuse_overwrite, write_json

if TYPE_CHECKING:
    from trtspec.heads.data.prompts import Prompt
    from trtspec.heads.data.synthesis import AnswerSampling, Outcome, TargetEndpoint


SECRET = typer.Option(help="Bearer token.", envvar="OPENAI_API_KEY")
PROMPTS_HELP = "Prompts: jsonl, json, parquet, text, a directory of these, or a hub data set org/name[:config]."


def synthesize(
    prompts: Annotated[str, typer.Argument(help=PROMPTS_HELP)],
    output: Annotated[Path, typer.Option("--output", "-o", help="The data set to write (jsonl).")],
    base_url: Annotated[str, typer.Option(help="OpenAI endpoint of the target.")] = "http://127.0.0.1:8000/v1",
    model: Annotated[str | None, typer.Option(help="Model name [the first that the server lists].")] = None,
    api_key: Annotated[str, SECRET] = "none",
    concurrency: Annotated[int, typer.Option(min=1, help="Requests in flight.")] = 16,
    split: Annotated[str | None, typer.Option(help="Split of a hub data set [train].")] = None,
    samples: Annotated[int, typer.Option(min=0, help="Answer only the first N prompts; 0 for all.")] = 0,
    max_tokens: Annotated[int, typer.Option(min=1, help="Longest answer in tokens.")] = 512,
    temperature: Annotated[float, typer.Option(min=0.0, help="Of the answers; use the one you will serve with.")] = 1.0,
    top_p: Annotated[float, typer.Option(min=0.0, max=1.0, help="Nucleus of the answers.")] = 1.0,
    thinking: Annotated[Literal["keep", "drop"], typer.Option(help="Reasoning before the answers.")] = "keep",
    raw: Annotated[bool, typer.Option("--raw", help="Continue bare text through /completions, untemplated.")] = False,
    extra_body: Annotated[str | None, typer.Option(help="JSON merged into every request.")] = None,
    shard: Annotated[str | None, typer.Option(help="i/n: only part i of n, for several machines.")] = None,
    timeout: Annotated[float, typer.Option(min=1.0, help="Seconds that one request may take.")] = 600.0,
    restart: Annotated[bool, typer.Option("--restart", help="Forget the answers of an interrupted run.")] = False,
    dry_run: DryRunOption = False,
    force: ForceOption = False,
    json_output: JsonOption = False,
) -> None:
    """Let the target answer prompts through its OpenAI endpoint: the data that its draft head learns from.

    Each prompt's seed follows from its text. An interrupted run goes on when the same command is given again; what
    was answered is not asked again. Prompts that fail are listed and left out, with exit status 1.
    """
    from trtspec.heads.data import prompts as reading
    from trtspec.heads.data.synthesis import AnswerSampling, TargetEndpoint

    chosen = reading.shard(reading.read_prompts(prompts, split, samples), shard)
    if dry_run:
        print_json({"prompts": len(chosen), "output": str(output), "most_tokens": len(chosen) * max_tokens})
        return
    journal = output.with_name(f".{output.name}.journal")
    if restart:
        journal.unlink(missing_ok=True)
    if not journal.exists():
        refuse_overwrite(output, force)
    sampling = AnswerSampling(
        model, max_tokens, temperature, top_p, raw, json_object(extra_body or "{}", "--extra-body"), thinking
    )
    outcome = _answer(chosen, output, TargetEndpoint(base_url, api_key, concurrency, timeout), sampling, journal)
    summary = _summary(outcome, output, len(chosen))
    source = {"prompts": Path(prompts).name, "prompts_sha256": _digest(prompts, chosen), "endpoint": base_url}
    options = {"sampling": sampling.__dict__, "split": split, "samples": samples, "shard": shard}
    write_json(output.with_name(f"{output.name}.provenance.json"), provenance("synthesize", source, options, **summary))
    if json_output:
        print_json(summary | {"errors": outcome.failed})
    else:
        print(f"{output}: {outcome.answered} answered now, {outcome.resumed} before, {len(outcome.failed)} failed")
    _raise_failed(outcome, len(chosen))
    journal.unlink(missing_ok=True)


def _answer(
    chosen: list[Prompt], output: Path, endpoint: TargetEndpoint, sampling: AnswerSampling, journal: Path
) -> Outcome:
    from trtspec.heads.data.synthesis import synthesize as answer
    from trtspec.heads.progress import progress_bar

    tokens = 0
    with progress_bar("answers", len(chosen), "prompts") as advance:

        def on_answer(count: int) -> None:
            nonlocal tokens
            tokens += count
            advance(1, f"{tokens:,} tokens")

        return answer(
            chosen, output, endpoint, sampling, journal_path=journal, on_answer=on_answer,
            on_resumed=lambda count: advance(count, f"{count} were answered before" if count else ""),
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
