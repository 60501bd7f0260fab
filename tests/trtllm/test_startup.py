"""The torch-free commands start fast because of what they do not import; and the shortcut that allows it is right."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

SLOW = ("torch", "transformers", "huggingface_hub", "httpx", "rich.console", "numpy", "safetensors")
GOOD = """\
speculative_config: {decoding_type: Eagle, max_draft_len: 3, speculative_model_dir: nvidia/Kimi-K2.6-Eagle3}
moe_config: {backend: TRTLLM}
"""


def test_lint_imports_nothing_slow(tmp_path: Path) -> None:
    file = tmp_path / "engine.yml"
    file.write_text(GOOD)
    code = f"""
import sys
from trtspec.cli.app import main
sys.argv = ["trtspec", "lint", {str(file)!r}, "--trtllm-version", "1.4.0rc1", "--target", "nvidia/Kimi-K2.6-NVFP4"]
try:
    main()
except SystemExit:
    pass
sys.stderr.write("loaded " + " ".join(name for name in {SLOW!r} if name in sys.modules))
"""
    environment = {**os.environ, "HF_HOME": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, check=True)
    assert "no errors" in done.stdout
    assert done.stderr.rpartition("loaded ")[2].split() == []


@pytest.mark.parametrize(
    "variables",
    [{}, {"HF_HOME": "/a"}, {"HF_HUB_CACHE": "/b", "HF_HOME": "/a"}, {"XDG_CACHE_HOME": "/c"},
     {"HUGGINGFACE_HUB_CACHE": "/d"}, {"HF_HOME": "~/$USER/x", "USER": "me"}],
    ids=str,
)  # fmt: skip
def test_the_hub_cache_is_looked_for_where_the_library_keeps_it(variables: dict[str, str]) -> None:
    """The folder that is looked for before the library is imported is the library's own."""
    code = """
import json
from trtspec.checkpoint.hub import cache_directory
ours = str(cache_directory())
from huggingface_hub import constants
print(json.dumps([ours, constants.HF_HUB_CACHE]))
"""
    kept = {key: value for key, value in os.environ.items() if not key.startswith(("HF_", "XDG_", "HUGGINGFACE"))}
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env={**kept, **variables}, check=True
    )
    ours, theirs = json.loads(done.stdout)
    assert ours == theirs
