"""The serving image, really built over a base for each tag of docs/hardware.md, and then run.

The bases carry what the release publishes as its requirements, as far as trtspec meets it, and a
package in the engine's name that imports them as the engine does.
"""

import json
import re
import time
from pathlib import Path

import pytest
import yaml

from tests.docker.buildah import REALLY_BUILT, ROOT, Buildah

HERE = Path(__file__).resolve().parent
PINS = yaml.safe_load((HERE / "engine_pins.yaml").read_text())
TAGS = re.findall(r"^\| `(\d[^`]*)` \|", (ROOT / "docs/hardware.md").read_text(), re.MULTILINE)
ENGINE = """FROM localhost/base
RUN python3 -m venv /tmp/venv \\
    && /tmp/venv/bin/pip install --no-cache-dir --target \
/usr/local/lib/python3.11/dist-packages {requirements} \\
    && rm -rf /tmp/venv
COPY standin_engine/tensorrt_llm /usr/local/lib/python3.11/dist-packages/tensorrt_llm
RUN cd /usr/local/lib/python3.11/dist-packages \\
    && printf '\\nimport huggingface_hub, numpy, transformers\\n__version__ = "{tag}"\\n' \
>> tensorrt_llm/__init__.py \\
    && mkdir tensorrt_llm-{tag}.dist-info && cd tensorrt_llm-{tag}.dist-info \\
    && printf 'Metadata-Version: 2.1\\nName: tensorrt_llm\\nVersion: {tag}\\n' > METADATA \\
    && cd /usr/local/bin \\
    && printf '#!/usr/bin/python3\\nimport tensorrt_llm\\nprint(tensorrt_llm.__version__)\\n' \
> trtllm-serve \\
    && chmod 755 trtllm-serve
"""
FREEZE = (
    "import importlib.metadata as m; "
    "print(sorted(f'{d.name}=={d.version}' for d in m.distributions()))"
)
IMPORTS = """
import importlib, pkgutil, trtspec
failed, count = [], 0
for module in pkgutil.walk_packages(trtspec.__path__, "trtspec."):
    try:
        importlib.import_module(module.name); count += 1
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] not in ("torch", "transformers", \
"fastapi", "uvicorn", "llguidance",
            "prometheus_client", "modelopt", "safetensors.torch", "numba", "datasets", "starlette"):
            failed.append(f"{module.name}: {error}")
    except Exception as error:
        failed.append(f"{module.name}: {error!r}")
assert not failed, failed
print(count)
"""

pytestmark = REALLY_BUILT


def test_every_listed_tag_has_pins() -> None:
    assert set(TAGS) == set(PINS) and len(TAGS) >= 6


@pytest.mark.parametrize("tag", TAGS)
def test_the_image_works_beside_the_engine_of_the_tag(
    tag: str, buildah: Buildah, tmp_path: Path
) -> None:
    started = time.monotonic()
    base, image = f"localhost/engine:{tag}", f"localhost/trtspec:{tag}"
    wanted = {name: pin for name, pin in PINS[tag].items() if name != "published_as"}
    requirements = " ".join(
        f"'{name}{pin}'" for name, pin in (wanted | {"pyyaml": "", "pydantic": ">=2.9.1"}).items()
    )
    dockerfile = tmp_path / "Dockerfile"
    dockerfile.write_text(ENGINE.format(tag=tag, requirements=requirements))
    buildah.build(str(dockerfile), base, context=str(ROOT / "tests" / "trtllm"))
    before = buildah.run(base, "python3", "-c", FREEZE, user="0")
    buildah.build(
        "docker/serve.Dockerfile",
        image,
        "--build-arg",
        f"TRTLLM_VERSION={tag}",
        "--build-arg",
        f"BASE={base}",
        "--build-arg",
        "REVISION=abc123",
    )
    try:
        built = time.monotonic() - started
        check(buildah, image, tag, before)
        print(f"\n{tag}: {requirements}; built in {built:.0f} s")
    finally:
        buildah("rmi", "--force", image, base)


def check(buildah: Buildah, image: str, tag: str, before: str) -> None:
    labels = buildah.config(image, f"localhost/engine:{tag}")["Labels"]
    assert (
        labels["trtspec.trtllm-version"] == tag
        and labels["org.opencontainers.image.revision"] == "abc123"
    )
    # the engine's environment is as it was, and imports
    assert buildah.run(image, "/usr/bin/python3", "-c", FREEZE) == before
    assert buildah.run(image, "trtllm-serve", "--version").splitlines()[-1] == tag
    # ours imports, and the engine's own classes judge a file from it
    count = int(buildah.run(image, "/opt/trtspec/bin/python", "-c", IMPORTS).splitlines()[-1])
    assert count > 80
    judged = (
        "printf 'stream_interval: 1\\n' > /tmp/e.yml && trtspec lint /tmp/e.yml --installed --json"
    )
    answer = json.loads(
        buildah.run(image, "sh", "-c", f"cd /tmp && {judged} --trtllm-version {tag}")
    )
    assert answer["ok"] and answer["version"] == tag, answer
    bill = json.loads(buildah.run(image, "cat", labels["trtspec.sbom"]))
    named = {item["name"].lower(): item["version"] for item in bill["components"]}
    assert bill["bomFormat"] == "CycloneDX" and {"typer", "huggingface-hub", "transformers"} <= {
        n.replace("_", "-") for n in named
    }
    print(f"\n{tag}: {count} modules import, {len(named)} components in the SBOM")
