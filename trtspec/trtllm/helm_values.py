"""Chart values that carry an engine configuration: the same YAML as text, the options, the image tag, the GPUs."""

from __future__ import annotations

import yaml

from trtspec.trtllm.config import EngineConfig


class _Text(str):
    """Written as a literal block, so that the engine's YAML keeps its comments and stays readable."""


class _Dumper(yaml.SafeDumper):
    pass


_Dumper.add_representer(_Text, lambda dumper, text: dumper.represent_scalar("tag:yaml.org,2002:str", text, style="|"))


def helm_values(built: EngineConfig, argv: list[str]) -> str:
    """`argv` as build_command gives it; the path of the configuration is the chart's business and is left out."""
    intent = built.intent
    options = argv[2 : argv.index("--extra_llm_api_options")]
    values = {
        "image": {"tag": intent.version},
        "model": {"target": intent.target, "head": intent.head},
        "gpus": intent.tp_size,
        "server": {"args": options},
        "engineConfig": _Text(built.text),
    }
    return f"{intent.first_line()} --format helm-values\n" + yaml.dump(
        values, Dumper=_Dumper, sort_keys=False, width=10**6
    )
