"""`trtspec synthesize`: the target writes the answers that a head is trained on."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from trtspec.cli.options import DryRunOption, ForceOption, JsonOption
from trtspec.errors import TrtspecError, UsageError


def synthesize(
    prompts: Annotated[Path, typer.Argument(help="Prompts: jsonl (prompt, messages, conversations, turns) or text.")],
    output: Annotated[Path, typer.Option("--output", "-o", help="The data set to write (jsonl).")],
    base_url: Annotated[str, typer.Option(help="OpenAI endpoint of the target.")] = "http://127.0.0.1:8000/v1",
    model: Annotated[str | None, typer.Option(help="Model name [the first that the server lists].")] = None,
    api_key: Annotated[str, typer.Option(help="Bearer token.", envvar="OPENAI_API_KEY")] = "none",
    concurrency: Annotated[int, typer.Option(min=1, help="Requests in flight.")] = 16,
    samples: Annotated[int, typer.Option(min=0, help="Answer only the first N prompts; 0 for all.")] = 0,
    max_tokens: Annotated[int, typer.Option(min=1, help="Longest answer in tokens.")] = 512,
    temperature: Annotated[float, typer.Option(min=0.0, help="Of the answers; use the one you will serve with.")] = 1.0,
    top_p: Annotated[float, typer.Option(min=0.0, max=1.0, help="Nucleus of the answers.")] = 1.0,
    raw: Annotated[
        bool, typer.Option("--raw", help="Continue bare text through /completions, no chat template.")
    ] = False,
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
    from trtspec.heads import prompts as reading
    from trtspec.heads.progress import progress_bar
    from trtspec.heads.synthesize import Endpoint, Sampling
    from trtspec.heads.synthesize import synthesize as answer
    from trtspec.report import file_sha256, print_json, provenance, refuse_overwrite, write_json

    chosen = reading.read_prompts(prompts)
    chosen = reading.shard(chosen[:samples] if samples else chosen, shard)
    journal = output.with_name(f".{output.name}.journal")
    if restart:
        journal.unlink(missing_ok=True)
    if dry_run:
        print_json({"prompts": len(chosen), "output": str(output), "most_tokens": len(chosen) * max_tokens})
        return
    if not journal.exists():
        refuse_overwrite(output, force)
    sampling = Sampling(model, max_tokens, temperature, top_p, raw, _json_object(extra_body))
    endpoint = Endpoint(base_url, api_key, concurrency, timeout)
    with progress_bar("answers", len(chosen), "prompts") as advance:
        outcome = answer(
            chosen,
            output,
            endpoint,
            sampling,
            journal_path=journal,
            on_answer=lambda tokens: advance(1, f"+{tokens} tokens"),
            on_resumed=lambda count: advance(count, "resumed" if count else ""),
        )
    summary = {
        "output": str(output),
        "prompts": len(chosen),
        "answered": outcome.answered,
        "resumed": outcome.resumed,
        "failed": len(outcome.failed),
        "completion_tokens": outcome.tokens,
        "seconds": round(outcome.seconds, 2),
    }
    source = {"prompts": prompts.name, "prompts_sha256": file_sha256(prompts), "endpoint": base_url}
    options = {"sampling": sampling.__dict__, "samples": samples, "shard": shard}
    write_json(output.with_name(f"{output.name}.provenance.json"), provenance("synthesize", source, options, **summary))
    if json_output:
        print_json(summary | {"errors": outcome.failed})
    else:
        print(f"{output}: {outcome.answered} answered now, {outcome.resumed} before, {len(outcome.failed)} failed")
    if outcome.failed:
        name, reason = next(iter(outcome.failed.items()))
        raise TrtspecError(
            f"TS-SYNTH-FAILED {len(outcome.failed)} of {len(chosen)} prompts have no answer; {name}: {reason}",
            "run the same command again to ask only these",
        )
    journal.unlink(missing_ok=True)


def _json_object(text: str | None) -> dict:
    try:
        value = json.loads(text or "{}")
    except json.JSONDecodeError as error:
        raise UsageError(f"--extra-body is not JSON: {error}", "pass an object such as '{\"top_k\": 20}'") from None
    if not isinstance(value, dict):
        raise UsageError("--extra-body must be a JSON object", "pass an object such as '{\"top_k\": 20}'")
    return value
