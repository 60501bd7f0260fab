"""What the words after `--` of a proof may not say: options of `trtspec serve`, and of the engine behind a further
`--`, that each launch of a proof sets, or with which its launches would not be what the proof says they are."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from trtspec.errors import UsageError

HERE = "servers of a proof run on the GPUs of this machine"
ONE = "each launch of a proof is one server that answers requests"
DRAFTS = "the plain server drafts nothing, the others with the head"
FILE = "`serve` takes no --draft-len beside a file; pass sizes as options of `serve`, such as --max-batch-size"
OWN_OPTIONS = {  # of serve, which a proof sets or rules out; and how a proof is told. Their variables are not passed on
    "--head": "pass --head before it",
    "--draft-len": "pass --draft-len before it",
    "--backend": "pass --backend before it",
    "--tp-size": "pass --gpus before it",
    "--speculation": DRAFTS,
    "--draft-sampling": f"{DRAFTS}, and `serve` takes it only with a head",
    "--config": FILE,
    "--disaggregated": ONE,
    "--role": ONE,
    "--launcher": HERE,
    "--launcher-args": HERE,
    "--nodes": HERE,
    "--gpus-per-node": HERE,
    "--host": "servers of a proof listen on 127.0.0.1",
    "--port": "servers of a proof take a free port",
    "--dry-run": "pass --dry-run before it",
}
GPUS = "pass --gpus before the first `--`: a server of a proof has that many, all tensor-parallel"
HEAD = "pass --head and --draft-len before the first `--`"
# of trtllm-serve and vllm serve, every spelling, without leading dashes and with dashes for underscores
ENGINE_OPTIONS = {
    **dict.fromkeys(("tensor-parallel-size", "tp-size", "tp"), GPUS),
    **dict.fromkeys(("pipeline-parallel-size", "pp-size", "pp"), GPUS),
    **dict.fromkeys(("context-parallel-size", "cp-size", "prefill-context-parallel-size", "pcp"), GPUS),
    **dict.fromkeys(("data-parallel-size", "dp", "data-parallel-size-local", "dpl"), GPUS),
    **dict.fromkeys(("gpus-per-node", "nnodes", "n", "node-rank", "r"), HERE),
    **dict.fromkeys(("data-parallel-rank", "dpn", "data-parallel-start-rank", "dpr"), HERE),
    **dict.fromkeys(("data-parallel-address", "dpa"), HERE),
    **dict.fromkeys(("speculative-config", "sc", "spec-model", "spec-method", "spec-tokens"), HEAD),
    **dict.fromkeys(("config", "extra-llm-api-options"), FILE),
    **dict.fromkeys(("server-role", "disagg-cluster-uri", "metadata-server-config-file", "headless", "grpc"), ONE),
}


def refuse_own_options(words: Sequence[str]) -> None:
    """Raises UsageError for the first of a user's words for `serve` that would change what is proved: the last of two
    options counts. What follows a `--` among them is the engine's."""
    for flag, remedy in _contradictions(words):
        raise UsageError(f"{flag} cannot be passed to the servers of a proof", f"leave it out; {remedy}")


def _contradictions(words: Sequence[str]) -> Iterator[tuple[str, str]]:
    cut = list(words).index("--") if "--" in words else len(words)
    for word in words[:cut]:
        flag = word.partition("=")[0]
        if flag in OWN_OPTIONS:
            yield flag, OWN_OPTIONS[flag]
    for word in words[cut + 1 :]:
        flag = word.partition("=")[0]
        name = flag.partition(".")[0].lstrip("-").replace("_", "-")
        if flag.startswith("-") and name in ENGINE_OPTIONS:
            yield flag, ENGINE_OPTIONS[name]
