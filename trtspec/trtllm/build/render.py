"""An intent as everything that a launcher or a chart needs: the engine YAML, the command and the sizes."""

from __future__ import annotations

from dataclasses import dataclass, replace

from trtspec.specs import HeadSpec, ModelSpec
from trtspec.trtllm.build.config import build
from trtspec.trtllm.document import Document
from trtspec.trtllm.intent import Intent, Role
from trtspec.trtllm.lint.finding import Finding
from trtspec.trtllm.schema import schema_for
from trtspec.trtllm.serve.command import CONFIG_NAME, build_command

FILES: dict[Role, str] = {"context": "context.yml", "generation": "generation.yml", "front": "front.yml"}


@dataclass(frozen=True)
class Recipe:
    """`argv` starts with trtllm-serve and ends with the path of the configuration."""

    intent: Intent
    text: str
    argv: list[str]
    findings: tuple[Finding, ...]

    @property
    def version(self) -> str:
        return self.intent.version

    @property
    def nodes(self) -> int:
        return self.intent.nodes

    @property
    def gpus_per_node(self) -> int:
        return self.intent.gpus_per_node

    def values_text(self) -> str:
        """Chart values; raises UsageError for one part of a disaggregated deployment."""
        from trtspec.trtllm.build.helm import helm_values

        return helm_values(self)


def render(intent: Intent, config_path: str = CONFIG_NAME) -> Recipe:
    """Looks target and head up by name, as the commands do. Raises CheckFailed when no file can do it."""
    from trtspec.trtllm.names import load_head, load_target

    target = load_target(intent.target).spec
    return render_specs(intent, target, load_head(intent.head).spec if intent.head else None, config_path)


def render_specs(intent: Intent, target: ModelSpec, head: HeadSpec | None, config_path: str = CONFIG_NAME) -> Recipe:
    built = build(intent, target, head)
    if intent.role == "front":
        return Recipe(intent, built.text, ["trtllm-serve", "disaggregated", "-c", config_path], ())
    command = build_command(
        intent, target, schema_for(intent.version), Document.parse(built.text),
        host="0.0.0.0", port=8000, config_path=config_path, explicit={}, passed=[],
    )  # fmt: skip
    return Recipe(intent, built.text, command.argv, built.findings)


def disaggregated(intent: Intent) -> dict[str, Intent]:
    """The three files of a disaggregated deployment by name: both kinds of server, and the front."""
    prefill = replace(intent, role="context", max_batch_size=None, context_urls=(), generation_urls=())
    decode = replace(intent, role="generation", context_urls=(), generation_urls=())
    return {FILES["context"]: prefill, FILES["generation"]: decode, FILES["front"]: replace(intent, role="front")}
