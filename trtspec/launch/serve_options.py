"""The options of `trtspec serve`, and which backends use each.

The backends are TensorRT-LLM, the front of several servers, vLLM and the reference backend.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Literal

from trtspec.launch.server_launch import Limits
from trtspec.records import (
    DryRunOption,
    Excludes,
    HeadOption,
    JsonOption,
    Mode,
    Modes,
    Needs,
    TargetArgument,
    argument,
    option,
)

# backends that an option can belong to: its name in messages, the option that chooses it, and the
# software
ENGINE = Mode("the TensorRT-LLM engine", "`backend` trtllm", "TensorRT-LLM")
FRONT = Mode("the front of a disaggregated deployment", "`disaggregated` FILE", "TensorRT-LLM")
VLLM = Mode("vLLM", "`backend` vllm", "vLLM")
REFERENCE = Mode("the reference backend", "`backend` reference", "the reference backend")
SERVERS = Modes(ENGINE, VLLM, REFERENCE)  # servers that generate
ENGINES = Modes(ENGINE, VLLM)
LAUNCHED = Modes(ENGINE, FRONT, VLLM)  # servers that run in a process of their own


@dataclass(frozen=True, kw_only=True)
class ServeOptions:
    """The options of `trtspec serve`, with times in seconds.

    None means that the user did not give the option, so that the backend decides.
    """

    target: TargetArgument
    passed: Annotated[
        tuple[str, ...],
        argument("Any option of trtllm-serve or vllm serve, after `--`.", metavar="[-- OPTIONS]"),
        ENGINES,
    ] = ()
    head: Annotated[HeadOption, SERVERS] = None
    backend: Annotated[
        Literal["trtllm", "pytorch", "vllm", "reference"],
        option(
            "trtllm: NVIDIA TensorRT-LLM (pytorch: the same, as on model cards). vllm: vLLM. "
            "reference: plain PyTorch, on a CPU or a GPU."
        ),
    ] = "trtllm"
    config: Annotated[
        Path | None,
        option(
            "Engine YAML, or vLLM's configuration file. Default: one for this launch.",
            "--config",
            "--extra-llm-api-options",
        ),
        Modes(
            ENGINE,
            VLLM,
            instead="pass the sizes in it as options: --head, --draft-len, --max-batch-size, "
            "--max-num-tokens, --max-seq-len",
        ),
    ] = None
    host: Annotated[str, option("Address to listen on; 0.0.0.0 in a container."), SERVERS] = (
        "localhost"
    )
    port: Annotated[
        int,
        option("Port to listen on; 0: any free port (reference backend only).", min=0, max=65535),
        SERVERS,
    ] = 8000
    goal: Annotated[
        Literal["latency", "throughput"] | None,
        option(
            "What the default sizes are chosen for, as in build-config. Default: latency.",
            group="Sizes",
        ),
        Modes(ENGINE),
    ] = None
    tp_size: Annotated[
        int | None,
        option(
            "Tensor-parallel size. Default: the file's, else 4; with vLLM 8.", min=1, group="Sizes"
        ),
        ENGINES,
    ] = None
    # without a file, TensorRT-LLM has the goal's sizes, and vLLM has its own
    max_batch_size: Annotated[
        int | None,
        option(
            "Requests per step. Default: the file's or the engine's; reference: 16.",
            min=1,
            group="Sizes",
        ),
        SERVERS,
    ] = None
    max_num_tokens: Annotated[
        int | None,
        option(
            "Tokens per step. Default: the file's or the engine's; reference: 512.",
            min=1,
            group="Sizes",
        ),
        SERVERS,
    ] = None
    max_seq_len: Annotated[
        int | None,
        option(
            "Prompt and answer together. Default: the file's or the engine's; "
            "reference: at most 4096.",
            min=1,
            group="Sizes",
        ),
        SERVERS,
    ] = None
    draft_len: Annotated[
        int | None,
        option("Tokens drafted per step. Default: 3.", min=1, group="Sizes"),
        SERVERS,
        Excludes("config"),
        Needs("head"),
    ] = None
    draft_sampling: Annotated[
        Literal["argmax", "probabilistic"] | None,
        option(
            "Drafts of sampled requests: the head's likeliest tokens (argmax, default), "
            "or from its distribution.",
            group="Requests",
        ),
        Modes(VLLM, REFERENCE),
        Needs("head"),
    ] = None
    prefix_cache_mib: Annotated[
        int | None,
        option(
            "Memory for the caches of known prefixes; 0: none is reused. Default: 256.",
            min=0,
            group="Sizes",
        ),
        Modes(REFERENCE),
    ] = None
    dtype: Annotated[
        Literal["auto", "float32", "bfloat16", "float16"],
        option("Data type of the computation. auto: bfloat16 where it is native.", group="Sizes"),
        Modes(VLLM, REFERENCE),
    ] = "auto"
    device: Annotated[str, option("cpu or cuda."), Modes(REFERENCE)] = "cpu"
    served_model_name: Annotated[
        str | None, option("Name in /v1/models. Default: the target's.", group="Requests"), SERVERS
    ] = None
    max_queue: Annotated[
        int | None,
        option(
            "Requests that may wait; more get status 429. Default: 512.", min=0, group="Requests"
        ),
        Modes(REFERENCE),
    ] = None
    api_key: Annotated[
        str | None,
        option(
            "Key that requests must carry. Better TRTSPEC_SERVE_API_KEY: "
            "other users see a command line.",
            group="Requests",
        ),
        Modes(VLLM, REFERENCE),
    ] = field(default=None, repr=False)
    trust_remote_code: Annotated[
        bool, option("Let the engine run the Python code in the checkpoint."), ENGINES
    ] = False
    launcher: Annotated[
        Literal["direct", "lws"],
        option(
            "What starts the ranks: trtllm-serve itself, "
            "or mpirun in the leader pod of a LeaderWorkerSet.",
            group="Several nodes or servers",
        ),
        Modes(ENGINE),
    ] = "direct"
    nodes: Annotated[
        int | None,
        option(
            "Number of nodes. Default: the file's, else 1.", min=1, group="Several nodes or servers"
        ),
        Modes(ENGINE),
    ] = None
    gpus_per_node: Annotated[
        int | None,
        option(
            "GPUs to use on each node. Default: ranks divided by nodes.",
            min=1,
            group="Several nodes or servers",
        ),
        Modes(ENGINE),
    ] = None
    launcher_args: Annotated[
        str,
        option(
            "Extra arguments for mpirun, as one quoted string.", group="Several nodes or servers"
        ),
        Modes(ENGINE),
        Needs("launcher=lws"),
    ] = ""
    role: Annotated[
        Literal["context", "generation"] | None,
        option(
            "One half of a disaggregated deployment. Default: the file's, else none.",
            group="Several nodes or servers",
        ),
        Modes(ENGINE),
    ] = None
    disaggregated: Annotated[
        Path | None,
        option(
            "Launch the front of a disaggregated deployment from this file.",
            group="Several nodes or servers",
        ),
        Modes(FRONT),
    ] = None
    trtllm_version: Annotated[
        str | None,
        option("Version to check for. Default: the installed one.", group="Releases and times"),
        Modes(ENGINE),
    ] = None
    vllm_version: Annotated[
        str | None,
        option("Release to check for. Default: the installed one.", group="Releases and times"),
        Modes(VLLM),
    ] = None
    startup_timeout: Annotated[
        float,
        option("Seconds until the server must be ready.", min=0, group="Releases and times"),
        LAUNCHED,
    ] = 7200.0
    stop_grace: Annotated[
        float,
        option(
            "Seconds to wait for a clean shutdown before sending SIGKILL.",
            min=0,
            group="Releases and times",
        ),
        LAUNCHED,
    ] = 30.0
    hung_after: Annotated[
        float,
        option(
            "Seconds without an answer from /health until a server is stopped; 0: never.",
            min=0,
            group="Releases and times",
        ),
        LAUNCHED,
    ] = 120.0
    dry_run: DryRunOption = False
    json_: JsonOption = False

    @property
    def limits(self) -> Limits:
        """Time limits of the server."""
        return Limits(self.startup_timeout, self.stop_grace, self.hung_after)

    @property
    def mode(self) -> Mode:
        """Backend that the options choose."""
        mode = {"vllm": VLLM, "reference": REFERENCE}.get(self.backend, ENGINE)
        return FRONT if mode is ENGINE and self.disaggregated is not None else mode
