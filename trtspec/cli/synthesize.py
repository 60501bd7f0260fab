"""`trtspec synthesize`: the target writes the answers that a head is trained on."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from trtspec.errors import TrtspecError
from trtspec.records import JsonOption, Needs, argument, fill, option
from trtspec.report import Result, progress_bar, refuse_input, value_table
from trtspec.verbs.options import ExtraBody, JsonObject, OutputFlags, WaitReadyOption

if TYPE_CHECKING:
    from trtspec.heads.synthesis import AnswerSampling


@dataclass(frozen=True, kw_only=True)
class SynthesizeOptions(OutputFlags):
    prompts: Annotated[
        str,
        argument(
            "Prompts: JSON lines or a JSON array, a directory of these, or a hub data set "
            "org/name[@commit][:config]."
        ),
    ]
    output: Annotated[Path, option("Data set to write (jsonl).", "-o")]
    base_url: Annotated[
        str, option("OpenAI-compatible endpoint of the target, with or without /v1.")
    ] = "http://127.0.0.1:8000"
    model: Annotated[
        str | None, option("Model name.", default="the first one the server lists")
    ] = None
    api_key: Annotated[
        str, option("Bearer token; OPENAI_API_KEY is read too.", envvar="OPENAI_API_KEY")
    ] = "none"
    concurrency: Annotated[int, option("Maximum number of requests in flight.", min=1)] = 16
    split: Annotated[
        str | None,
        option("Split of a hub data set.", default="train"),
        Needs("from_hub"),
    ] = None
    samples: Annotated[int, option("Use only the first N prompts; 0 uses all.", min=0)] = 0
    max_tokens: Annotated[int, option("Maximum tokens per answer.", min=1, group="Requests")] = 512
    temperature: Annotated[
        float, option("Sampling temperature; use your production value.", min=0.0, group="Requests")
    ] = 1.0
    top_p: Annotated[
        float, option("Nucleus sampling probability.", min=0.0, max=1.0, group="Requests")
    ] = 1.0
    extra_body: ExtraBody = JsonObject("{}", {})
    shard: Annotated[
        str | None, option("i/n: process only part i of n, to share the work among machines.")
    ] = None
    timeout: Annotated[
        float, option("Seconds to wait for one request.", min=1.0, group="Requests")
    ] = 600.0
    wait_ready: WaitReadyOption = 0.0
    json_: JsonOption = False

    @property
    def from_hub(self) -> bool:
        """a hub data set"""
        from trtspec.checkpoint.data_rows import from_hub

        return from_hub(self.prompts)


def synthesize(options: SynthesizeOptions) -> Result:
    """Generate training data: send prompts to the target through its OpenAI-compatible endpoint.

    The seed of each prompt follows from its text. Run an interrupted command again to resume it.
    Finished answers are not requested again. Prompts that fail are listed and left out, and the
    exit status is 1.
    """
    from trtspec.client.addresses import bearer, server_url
    from trtspec.client.client import wait_ready
    from trtspec.heads import synthesis

    refuse_input(options.output, Path(options.prompts), "output")
    endpoint = fill(synthesis.TargetEndpoint, options)
    sampling = fill(synthesis.AnswerSampling, options, extra_body=options.extra_body.value)
    prompts = synthesis.read_prompts(options.prompts, options.split, options.samples)
    chosen = synthesis.shard(prompts, options.shard)
    output = options.output
    work = synthesis.work_directory(output)
    resumes = work.check(options)
    if options.dry_run:
        plan = _dry_run(options, len(chosen), sampling, resumes)
        return Result(plan, tables=[value_table(plan)])
    if options.wait_ready:
        headers = bearer(options.api_key)
        asyncio.run(wait_ready(server_url(options.base_url), options.wait_ready, headers=headers))
    with progress_bar("answers", len(chosen), "prompts") as bar:
        outcome = synthesis.synthesize(chosen, output, endpoint, sampling, options, bar)
    quality, bad = synthesis.judge_answers(outcome.rows)
    summary = {
        "output": str(output),
        "prompts": len(chosen),
        "answered": outcome.answered,
        "resumed": outcome.resumed,
        "failed": len(outcome.failed),
        "completion_tokens": outcome.tokens,
        "seconds": round(outcome.seconds, 2),
        "quality": quality,
    }
    selection = {"split": options.split, "samples": options.samples, "shard": options.shard}
    results = {**summary, "degenerate_rows": bad}
    source = synthesis.prompt_source(options.prompts, chosen)
    synthesis.write_provenance(
        output, source, endpoint, sampling, outcome.server, selection, results
    )
    failure = None
    if outcome.failed:
        name, reason = next(iter(outcome.failed.items()))
        message = (
            f"TS-SYNTH-FAILED {len(outcome.failed)} of {len(chosen)} prompts have no answer; "
            f"{name}: {reason}"
        )
        failure = TrtspecError(message, "run the same command again to ask only these")
    else:
        work.finish()
    summary["errors"] = outcome.failed
    return Result(summary, tables=[value_table(summary)], failure=failure)


def _dry_run(
    options: SynthesizeOptions, prompts: int, sampling: AnswerSampling, resumes: bool
) -> dict[str, Any]:
    """Returns the object that --dry-run prints. The key itself is never shown."""
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
