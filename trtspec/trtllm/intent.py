"""The user's intent for one server, independent of the engine's release.

`Intent` defines the options of `trtspec build-config`, their environment variables, and the first
line of every file that the command writes. The first line is the command that writes the file
again. `parse_intent` reads it.
"""

from __future__ import annotations

import shlex
from dataclasses import dataclass, replace
from typing import Annotated, Any, Literal

from packaging.version import Version

from trtspec.checkpoint.published import DRAFT_LEN
from trtspec.errors import UsageError
from trtspec.foreign import parse_hub_id
from trtspec.records import Excludes, HeadOption, Needs, TargetArgument, option, parse, words
from trtspec.specs import Gpu, gpu_spec
from trtspec.trtllm.schema import parse_version

Goal = Literal["latency", "throughput"]
Role = Literal["context", "generation", "front"]
Form = Literal["yaml", "helm-values", "dynamo", "vllm"]
PREFIX = "# TensorRT-LLM "
ENGINE_FILE = "extra-llm-api-config.yml"  # usual name of an engine file
COMMAND = "trtspec build-config"
# Smallest number of ranks with attention data parallelism. With fewer ranks, the copies of the
# attention weights take more KV cache than they save.
ATTENTION_DP_FROM = 8
# The same on a context server, where a prompt is long and its cache leaves at once. InferenceX's
# context servers of Kimi-K2.5 have 4 ranks.
CONTEXT_ATTENTION_DP_FROM = 4
CONTEXT_BATCH = 4  # prompts at a time on a prefill server, as in Dynamo's recipe
SPARE_TOKENS = 128  # tokens of a generation server's step for requests that arrive
NOT_FRONT = Excludes("role=front")
OF_A_FRONT = Needs("role=front", "disaggregated")  # `disaggregated` is an option of the command
DEFAULT_TOKENS = 8192  # tokens per step, and tokens of a sequence
VLLM: Form = "vllm"
WEIGHTS = "/model-cache"  # directory of the claim that Dynamo's workers mount and HF_HOME names
# hub cache in the pods that a format is written for
CACHES: dict[Form, str] = {"helm-values": "/models/hub", "dynamo": f"{WEIGHTS}/hub"}
# options without a counterpart in vLLM's file
NOT_OF_VLLM = (
    "role", "disaggregated", "like", "version", "gpu", "experts_over", "isl", "osl", "concurrency",
    "spread_attention", "settings", "goal=throughput",
)  # fmt: skip
FRONT_IS_YAML = Excludes("format=helm-values", "format=dynamo")


@dataclass(frozen=True, kw_only=True)
class Intent:
    """The user's choices for one server. A field that is None, or an empty version, was not chosen.

    The written file has the properties `batch`, `tokens`, `seq_len`, `ep_size` and `attention_dp`.
    Sizes that were not chosen follow from the workload, or from the goal without a workload. The
    fields are in the order of the words on the first line.
    """

    target: TargetArgument
    head: Annotated[HeadOption, NOT_FRONT] = None
    version: Annotated[
        str,
        option(
            "Exact TensorRT-LLM version.",
            "--trtllm-version",
            default="the installed one, else the default release",
        ),
    ] = ""
    goal: Annotated[Goal, option("What the default sizes are chosen for."), NOT_FRONT] = "latency"
    tp_size: Annotated[
        int,
        option("Tensor-parallel size: GPUs of one server.", "--tp-size", "--tp", "--gpus", min=1),
        NOT_FRONT,
    ] = 4
    max_batch_size: Annotated[
        int | None,
        option(
            "Requests per step and rank. Default: set by --concurrency or --goal.",
            min=1,
            group="Load and sizes",
        ),
        NOT_FRONT,
    ] = None
    max_num_tokens: Annotated[
        int | None,
        option("Tokens per step. Default: 8192.", min=1, group="Load and sizes"),
        NOT_FRONT,
    ] = None
    max_seq_len: Annotated[
        int | None,
        option(
            "Maximum length of prompt and answer together. Default: --isl + --osl, else 8192.",
            min=1,
            group="Load and sizes",
        ),
        NOT_FRONT,
    ] = None
    draft_len: Annotated[
        int,
        option("Draft tokens per step, with --head.", min=1, group="Load and sizes"),
        NOT_FRONT,
        Needs("head"),
    ] = DRAFT_LEN
    nodes: Annotated[
        int, option("Nodes that one server spans.", min=1, group="Layout"), NOT_FRONT
    ] = 1
    gpu: Annotated[
        Gpu | None,
        option(
            "GPU type. Refuses what does not run or fit there; "
            "notes the KV-cache capacity in the file.",
            case_sensitive=False,
        ),
        NOT_FRONT,
    ] = None
    role: Annotated[
        Role | None,
        option("One part of a disaggregated deployment.", group="Disaggregated servers"),
        Excludes("disaggregated"),
    ] = None
    experts_over: Annotated[
        int | None,
        option(
            "Expert-parallel size. Default: set by --goal.",
            "--ep-size",
            "--ep",
            min=1,
            group="Layout",
        ),
        NOT_FRONT,
    ] = None
    isl: Annotated[
        int | None, option("Prompt tokens, with --osl.", min=1, group="Load and sizes"), NOT_FRONT
    ] = None
    osl: Annotated[
        int | None, option("Answer tokens, with --isl.", min=1, group="Load and sizes"), NOT_FRONT
    ] = None
    concurrency: Annotated[
        int | None,
        option("Concurrent requests of the whole server.", min=1, group="Load and sizes"),
        NOT_FRONT,
    ] = None
    spread_attention: Annotated[
        bool | None,
        option(
            "Attention data parallelism: each rank caches its own requests. "
            "Default: set by --goal.",
            "--attention-dp/--no-attention-dp",
            group="Layout",
        ),
        NOT_FRONT,
    ] = None
    context_urls: Annotated[
        tuple[str, ...],
        option(
            "A context server, for the front. Repeatable.",
            "--context-url",
            metavar="HOST:PORT",
            group="Disaggregated servers",
        ),
        OF_A_FRONT,
        FRONT_IS_YAML,
    ] = ()
    generation_urls: Annotated[
        tuple[str, ...],
        option(
            "A generation server, for the front. Repeatable.",
            "--generation-url",
            metavar="HOST:PORT",
            group="Disaggregated servers",
        ),
        OF_A_FRONT,
        FRONT_IS_YAML,
    ] = ()
    settings: Annotated[
        tuple[str, ...],
        option(
            "Any other engine setting, by its dotted key. Repeatable.", "--set", metavar="KEY=VALUE"
        ),
        NOT_FRONT,
    ] = ()
    trust_remote_code: Annotated[
        bool, option("Let the engine run the Python code in the checkpoint."), NOT_FRONT
    ] = False
    format: Annotated[
        Form,
        option(
            "The engine YAML, values of the Helm chart, a Dynamo deployment, "
            "or vLLM's configuration.",
            group="Clusters",
        ),
        Excludes("role=front", value="helm-values"),
        Excludes(*NOT_OF_VLLM, value=VLLM),
        Excludes("role", value="dynamo"),
    ] = "yaml"
    like: Annotated[
        str | None,
        option(
            "Published checkpoint of the same shapes and formats, "
            "for a TARGET that a later job will create.",
            metavar="HUB_ID",
            group="Clusters",
        ),
        NOT_FRONT,
    ] = None
    image: Annotated[
        str | None,
        option(
            "Container image of a Dynamo deployment. "
            "Default: of the Dynamo release with this version, else the newest.",
            group="Clusters",
        ),
        NOT_FRONT,
        Needs("format=dynamo"),
    ] = None
    quantize_from: Annotated[
        str | None,
        option(
            "With --format helm-values: the checkpoint that a Job quantizes into TARGET, "
            "a directory below /models.",
            metavar="HUB_ID",
            group="Clusters",
        ),
        NOT_FRONT,
        Needs("format=helm-values"),
    ] = None

    @property
    def gpus_per_node(self) -> int:
        """Number of ranks on each node."""
        return self.tp_size // self.nodes

    @property
    def nvlink_joins_nodes(self) -> bool:
        """Whether NVLink joins the nodes, so that a cluster must keep them together."""
        return self.nodes > 1 and self.gpu is not None and gpu_spec(self.gpu).nvlink_joins_nodes

    @property
    def attention_dp(self) -> bool:
        """Whether the server uses attention data parallelism, by choice or by goal and ranks."""
        if self.spread_attention is not None:
            return self.spread_attention
        least = CONTEXT_ATTENTION_DP_FROM if self.role == "context" else ATTENTION_DP_FROM
        return self.goal == "throughput" and self.tp_size >= least

    @property
    def ep_size(self) -> int | None:
        """Number of ranks that experts are spread over. None leaves the choice to the engine.

        For throughput, or with attention data parallelism, it is all ranks.
        """
        if self.experts_over is not None:
            return self.experts_over
        if self.goal == "throughput" or self.attention_dp:
            return self.tp_size
        return None

    @property
    def batch(self) -> int:
        """Number of requests per step and rank, as chosen or by the workload.

        For a context server it is CONTEXT_BATCH. Without a workload it is 32 for latency, as on the
        model cards. For throughput it is 128 with attention DP, as in the curated Kimi recipe.
        Otherwise it is 64, because four B200 hold 96 sequences of 8k in the FP8 cache.
        """
        if self.max_batch_size is not None:
            return self.max_batch_size
        if self.role == "context":
            return CONTEXT_BATCH
        if self.concurrency is not None:
            ranks = self.tp_size if self.attention_dp else 1
            return -(-self.concurrency // ranks)  # rounded up
        if self.goal == "latency":
            return 32
        return 128 if self.attention_dp else 64

    @property
    def step_tokens(self) -> int:
        """Number of tokens in one decode step of a full batch, drafts included."""
        if self.head:
            return self.batch * (self.draft_len + 1)
        return self.batch

    @property
    def tokens(self) -> int:
        """Number of tokens that one step may have, prompts included."""
        if self.max_num_tokens is not None:
            return self.max_num_tokens
        if self.role == "generation":
            with_spare = self.step_tokens + SPARE_TOKENS
            return -(-with_spare // SPARE_TOKENS) * SPARE_TOKENS  # a round number
        return max(DEFAULT_TOKENS, self.step_tokens)

    @property
    def seq_len(self) -> int:
        """Maximum length of prompt and answer together, in tokens."""
        if self.max_seq_len is not None:
            return self.max_seq_len
        if self.isl is not None and self.osl is not None:
            return self.isl + self.osl
        return DEFAULT_TOKENS

    @property
    def published_as(self) -> str:
        """Published name of the target, or of `like` for a target that a later job will create."""
        name = self.like or self.target
        hub_id = parse_hub_id(name)
        return name if hub_id is None else hub_id.name

    def fitted(self, positions: int) -> Intent:
        """Returns the intent with a default length of at most `positions` tokens of the model.

        A length that the user chose stays.
        """
        is_chosen = self.max_seq_len is not None or self.isl is not None
        return self if is_chosen else replace(self, max_seq_len=min(self.seq_len, positions))

    def checked(self) -> Intent:
        """Returns itself. Raises UsageError for sizes that contradict each other."""
        if self.tp_size % self.nodes:
            message = f"{self.tp_size} ranks do not spread evenly over {self.nodes} nodes"
            even = -(-self.tp_size // self.nodes) * self.nodes
            raise UsageError(message, f"use `tp_size` {even}")
        if self.gpu:
            gpus_of_node = gpu_spec(self.gpu).gpus_per_node
            ranks = self.gpus_per_node
            if ranks > gpus_of_node:
                message = (
                    f"{ranks} ranks on one node, but a node of {self.gpu.upper()} "
                    f"has {gpus_of_node} GPUs"
                )
                raise UsageError(message, f"use `nodes` {-(-self.tp_size // gpus_of_node)}")
        if (self.isl is None) != (self.osl is None):
            raise UsageError("`isl` and `osl` make the sequence length together", "give both")
        request = (self.isl or 0) + (self.osl or 0)
        if self.seq_len < request and self.role != "context":  # which holds prompts
            message = (
                f"`max_seq_len` {self.seq_len} does not hold `isl` and `osl`, {request} tokens"
            )
            raise UsageError(message, f"use `max_seq_len` {request}, or leave it out")
        step_tokens = self.step_tokens
        if self.tokens < step_tokens:
            message = (
                f"`max_num_tokens` {self.tokens} does not hold one step of {self.batch} requests"
            )
            if self.head:
                message += f" with {self.draft_len} draft tokens each"
            raise UsageError(message, f"use at least {step_tokens}, or a smaller `max_batch_size`")
        return self

    def command(self) -> str:
        """Command that writes the same file again, with every derived size spelled out."""
        if self.role == "front":
            return f"{COMMAND} {shlex.join(words(self))}"
        sized = replace(
            self, max_batch_size=self.batch, max_num_tokens=self.tokens, max_seq_len=self.seq_len
        )
        always = {"goal", "tp_size"}
        if self.head:
            always.add("draft_len")
        return f"{COMMAND} {shlex.join(words(sized, always))}"

    def settings_in_argv(self) -> dict[str, Any]:
        """Settings that are options of trtllm-serve and not in the file, by YAML path."""
        settings: dict[str, Any] = {
            "max_batch_size": self.batch,
            "max_num_tokens": self.tokens,
            "max_seq_len": self.seq_len,
            "tensor_parallel_size": self.tp_size,
        }
        if self.ep_size is not None:
            settings["moe_expert_parallel_size"] = self.ep_size
        if self.trust_remote_code:
            settings["trust_remote_code"] = True
        return settings

    def first_line(self) -> str:
        """First line of a written file: a comment with the release and the command."""
        return f"{PREFIX}{Version(self.version)}: {self.command()}"


def parse_intent(text: str) -> Intent | None:
    """Reads the intent on the first line of a file. None if build-config did not write the file.

    Raises UsageError if build-config does not accept the line.
    """
    first_line = text.partition("\n")[0]
    if not first_line.startswith(PREFIX) or f": {COMMAND} " not in first_line:
        return None
    version, _, command = first_line.removeprefix(PREFIX).partition(": ")
    parse_version(version)
    try:
        intent = parse(Intent, command.removeprefix(f"{COMMAND} "), "build-config")
    except (UsageError, ValueError) as error:  # ValueError: a quotation mark that nobody closed
        message = f"the first line of the configuration does not parse: {error}"
        raise UsageError(message, "write the file again") from None
    return intent if intent.version else replace(intent, version=version)
