"""The environment in which `trtspec serve --backend vllm` starts a real vLLM on a CPU."""

import os
import shutil
from collections.abc import Mapping
from pathlib import Path

ORACLES = Path(__file__).parent
# behind the `--` of serve: kimi-nano on a CPU
IN_VLLM = (
    "--",
    "--enforce-eager",
    "--language-model-only",
    "--no-enable-prefix-caching",
    "--max-logprobs",
    "20",
)


def vllm_environment(python: Path, place: Path, variables: Mapping[str, str]) -> dict[str, str]:
    """`variables` with vLLM's directory first on PATH, and with the plug-in.

    The plug-in is written to `place`, where its Python looks for entry points.
    """
    about = place / "trtspec_oracle-1.dist-info"
    about.mkdir(parents=True)
    shutil.copy(ORACLES / "vllm_on_a_cpu.py", place)
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: trtspec-oracle\nVersion: 1\n")
    (about / "entry_points.txt").write_text(
        "[vllm.general_plugins]\nnano = vllm_on_a_cpu:register\n"
    )
    return {
        **variables,
        "PATH": f"{python.absolute().parent}{os.pathsep}{variables['PATH']}",
        "PYTHONPATH": os.pathsep.join((str(place), str(ORACLES.parents[1]))),
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "TRTSPEC_PROGRESS": "1",
    }
