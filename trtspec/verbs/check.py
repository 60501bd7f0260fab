"""Asks the servers of a check and judges their answers: the options, the servers, the requests."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TypedDict

from trtspec import report
from trtspec.client.addresses import server_url
from trtspec.errors import TrtspecError, UsageError
from trtspec.foreign import PlainName
from trtspec.records import ForceOption, JsonOption, Mode, Modes, Needs, argument, option
from trtspec.verbs.bench import request_limits_of
from trtspec.verbs.options import RowName, WaitReadyOption

if TYPE_CHECKING:
    from trtspec.bench.check.asking import Asker
    from trtspec.bench.check.prompts import Prompts
    from trtspec.bench.check.rows import CheckVerdict
    from trtspec.checkpoint.tokenizer import KimiTokenizer
    from trtspec.client.exchange import Exchange

ALONE = Mode("`check` without --score", "`check` without --score")
SCORE = Mode("--score", "--score")
SIZES = ("dataset", "samples", "max_tokens", "context_tokens")  # options that decide the requests
# names of the two servers in errors; the answers of MAIN are recorded
MAIN = "the URL"
AGAINST = "`against`"
LIMIT = 4096  # tokens of prompt and answer, if the server names no limit


@dataclass(frozen=True, kw_only=True)
class CheckOptions:
    url: Annotated[str, argument("Endpoint to check, or with --score the one without speculation.")]
    record: Annotated[
        Path | None,
        option(
            "Save the answers of URL to this file, to be judged later. Continues an interrupted "
            "run."
        ),
    ] = None
    score: Annotated[
        Path | None,
        option(
            "Judge this recording of the speculating server; URL serves the model without "
            "speculation."
        ),
    ] = None
    against: Annotated[
        str | None,
        option("URL that serves the model without speculation and scores at once."),
        Modes(ALONE),
    ] = None
    min_acceptance: Annotated[float | None, option("Minimum tokens per step.", group="Verdict")] = (
        None
    )
    exact: Annotated[
        bool, option("Both servers compute in float32: every difference fails.", group="Verdict"),
        Needs("score", "against"),
    ] = False  # fmt: skip
    accept_unmeasured: Annotated[
        tuple[RowName, ...], option("Row that may stay unmeasured; repeatable.", group="Verdict")
    ] = ()
    dataset: Annotated[str, option("Questions, as for bench.", group="Requests"), Modes(ALONE)] = (
        "nano"
    )
    samples: Annotated[int, option("Questions.", min=1, group="Requests"), Modes(ALONE)] = 20
    max_tokens: Annotated[
        int, option("Maximum tokens per answer.", min=8, group="Requests"), Modes(ALONE)
    ] = 128
    context_tokens: Annotated[
        int,
        option(
            "Tokens of the long prompts; one more is near the server's limit.",
            min=1,
            group="Requests",
        ),
        Modes(ALONE),
    ] = 1024
    concurrency: Annotated[
        int,
        option("Requests in flight; one part asks four times as many.", min=1, group="Requests"),
    ] = 4
    timeout: Annotated[
        float, option("Seconds allowed for one answer.", min=0.001, group="Requests")
    ] = 120.0
    wait_ready: WaitReadyOption = 0.0
    model: Annotated[
        str | None,
        option("Model name.", default="the first one the server lists", group="Requests"),
    ] = None
    tokenizer: Annotated[
        str | None,
        option(
            "Tokenizer of the target: a directory or a hub id.",
            default="the model's name",
            group="Requests",
        ),
    ] = None
    force: Annotated[ForceOption, Needs("record")] = False
    json_: JsonOption = False


class CheckCost(TypedDict):
    """Requests of a check, tokens of its answers, and its duration."""

    requests: int
    tokens: int
    seconds: float


@dataclass(frozen=True)
class CheckOutcome:
    """The outcome of a check.

    Args:
        answered: number of recorded requests.
        failed: number of recorded requests without an answer.
        verdict: None if answers were only recorded.
        covered: the sentence on what the verdict covers.
    """

    cost: CheckCost
    answered: int = 0
    failed: int = 0
    verdict: CheckVerdict | None = None
    covered: str = ""


async def run_check(options: CheckOptions) -> CheckOutcome:
    """Asks the servers, records their answers, and judges them if another server scored them."""
    from trtspec.bench.check.rows import CheckVerdict, answers, coverage, judge

    began = time.monotonic()
    with report.progress_bar("asking", None, "requests") as bar:
        exchanges, plain, askers = await _exchanges(options, bar)
    cost: CheckCost = {
        "requests": sum(asker.requests for asker in askers),
        "tokens": sum(asker.tokens for asker in askers),
        "seconds": round(time.monotonic() - began, 1),
    }
    if options.record and not options.score and options.against is None:
        failed = sum(bool(look.fault) for look in answers(exchanges))
        return CheckOutcome(cost, len(exchanges), failed)
    rows = judge(exchanges, plain, min_acceptance=options.min_acceptance, exact=options.exact)
    verdict = CheckVerdict(rows=tuple(rows), accepted=frozenset(options.accept_unmeasured))
    return CheckOutcome(cost, verdict=verdict, covered=coverage(exchanges, rows))


async def _exchanges(
    options: CheckOptions, bar: report.ProgressBar
) -> tuple[list[Exchange], list[Exchange], list[Asker]]:
    """Returns the answers of the checked server, the answers without speculation, and the askers.

    The answers without speculation are [] if only a recording was made.
    """
    from trtspec.bench.check.asking import record, require_plain, score_answers
    from trtspec.client.exchange import read_recording, to_line

    recorded = read_recording(options.score) if options.score else None
    exchanges: list[Exchange] = []
    plain: list[Exchange] = []
    askers: list[Asker] = []
    async with AsyncExitStack() as servers:
        asker = await servers.enter_async_context(_asking(options, options.url, MAIN, bar))
        askers.append(asker)
        if recorded is not None:
            exchanges, plain = await score_answers(asker, recorded)
        elif options.against is None:
            exchanges = await record(asker, _prompts(options, asker))
        else:
            other = await servers.enter_async_context(
                _asking(options, options.against, AGAINST, bar)
            )
            askers.append(other)
            prompts = _prompts(options, asker)
            await require_plain(other, [prompts.raw("text 0", "text", prompts.texts[0])])
            exchanges = await record(asker, prompts)
            exchanges, plain = await score_answers(other, exchanges)
        if options.record and asker.journal:
            recording = exchanges if recorded is None else plain
            report.write_atomic(options.record, b"".join(map(to_line, recording)))
            asker.journal.path.unlink()
    return exchanges, plain, askers


def _prompts(options: CheckOptions, asker: Asker) -> Prompts:
    """Returns the prompts for this server, without prompts that its release or target rejects."""
    from trtspec.bench.check.prompts import Prompts
    from trtspec.bench.questions.datasets import load_dataset
    from trtspec.checkpoint.chat_parser import THINK_END
    from trtspec.checkpoint.tokenizer import read_optional

    ending = request_limits_of(asker.server).get("end_engine", ())
    withheld = dict.fromkeys(ending, "ends this release of the server")
    if "vision_config" not in read_optional(asker.tokenizer.directory / "config.json"):
        withheld["picture"] = "the target has no vision tower"
    if THINK_END not in asker.tokenizer.template.source:
        withheld["reasoning"] = "the target does not think"
    return Prompts(
        tokenizer=asker.tokenizer,
        questions=load_dataset(options.dataset).questions,
        samples=options.samples,
        max_tokens=options.max_tokens,
        context=options.context_tokens,
        limit=asker.server.context or LIMIT,
        ids=asker.server.adapter.ids,
        withheld=withheld,
    )


@asynccontextmanager
async def _asking(
    options: CheckOptions,
    url: str,
    what: str,
    bar: report.ProgressBar,
) -> AsyncIterator[Asker]:
    """Opens one server to ask. `what` names its URL in errors.

    The answers of MAIN are kept beside the recording while they arrive.
    """
    from trtspec.bench.check.asking import CROWD, Asker
    from trtspec.checkpoint.writer import Journal
    from trtspec.client.client import new_client, wait_ready
    from trtspec.client.servers import detect_server

    address = server_url(url, what)
    if options.wait_ready:
        await wait_ready(address, options.wait_ready)
    async with new_client(address, CROWD * options.concurrency) as client:
        server = await detect_server(client, options.model if what == MAIN else None)
        target = options.tokenizer or server.model
        asker = Asker(
            client=client,
            server=server,
            tokenizer=_tokenizer(target),
            concurrency=options.concurrency,
            timeout=options.timeout,
            bar=bar,
        )
        file = options.record
        if file is None or what != MAIN:
            yield asker
            return
        journal = file.with_name(PlainName(f"{file.name}.part"))
        remedy = f"ask the same server as before, or remove {journal} to start over"
        header = {name: getattr(options, name) for name in SIZES}
        header["tokenizer"] = target
        with Journal(journal, header, remedy=remedy) as opened:
            asker.use(opened)
            yield asker


def _tokenizer(name: str) -> KimiTokenizer:
    from trtspec.checkpoint.hub import resolve
    from trtspec.checkpoint.tokenizer import KimiTokenizer
    from trtspec.checkpoint.tokenizer_problems import require_tokenizer

    try:
        path = resolve(name, weights=False).path
        if path is None:
            raise UsageError(f"{name} is not in the hub cache", "")
        require_tokenizer(path)
        return KimiTokenizer(path)
    except TrtspecError as error:
        remedy = "name the target with `tokenizer`: a directory, or a hub id"
        raise UsageError(f"no tokenizer of {name} is here ({error.message})", remedy) from None
