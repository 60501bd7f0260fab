# trtspec beside NVIDIA's TensorRT-LLM: preflight, launch, and sshd for several nodes. Tags: docs/reference/support-matrix.md.
#   docker build -f docker/serve.Dockerfile --build-arg TRTLLM_VERSION=1.4.0rc1 -t trtspec:1.4.0rc1 .
# BASE by digest: docker buildx imagetools inspect nvcr.io/nvidia/tensorrt-llm/release:1.4.0rc1 prints it.
ARG TRTLLM_VERSION=1.4.0rc1
ARG BASE=nvcr.io/nvidia/tensorrt-llm/release:${TRTLLM_VERSION}

FROM ${BASE} AS environment
USER 0
# Open MPI starts its daemons on other nodes by ssh. The base decides which version its distribution has.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install -y --no-install-recommends openssh-client openssh-server python3-venv \
    && rm -rf /var/lib/apt/lists/* \
    && (getent passwd 1000 || useradd --create-home --uid 1000 trtspec) \
    && install -d -o 1000 /models /cache
WORKDIR /src
COPY LICENSE NOTICE README.md constraints.txt pyproject.toml ./
COPY trtspec trtspec
# In an environment of its own that sees the engine: the engine's own pins stay as NVIDIA set them. What asks the engine
# itself runs under the base's own interpreter, whose libraries are those pins.
RUN python3 -m venv --system-site-packages /opt/trtspec \
    && /opt/trtspec/bin/pip install --no-cache-dir --no-compile -c constraints.txt ".[endpoint]" \
    && ln -s /opt/trtspec/bin/trtspec /usr/local/bin/trtspec
USER 1000

FROM environment AS sbom
ARG CYCLONEDX_VERSION=7.5.0
RUN python3 -m venv /tmp/sbom \
    && /tmp/sbom/bin/pip install --no-cache-dir --no-compile "cyclonedx-bom==${CYCLONEDX_VERSION}" \
    && /tmp/sbom/bin/cyclonedx-py environment /opt/trtspec/bin/python --output-reproducible -o /tmp/sbom.cdx.json

FROM environment
ARG TRTLLM_VERSION
ARG BASE
ARG VERSION=0.1.0
ARG REVISION=unknown
LABEL org.opencontainers.image.title="trtspec on TensorRT-LLM" \
      org.opencontainers.image.description="Checks and launches Kimi-K2 with Eagle3 on TensorRT-LLM" \
      org.opencontainers.image.licenses="Apache-2.0" \
      org.opencontainers.image.version="${VERSION}" \
      org.opencontainers.image.revision="${REVISION}" \
      org.opencontainers.image.base.name="${BASE}" \
      trtspec.sbom="/opt/trtspec/sbom.cdx.json" \
      trtspec.trtllm-version="${TRTLLM_VERSION}"
COPY --from=sbom /tmp/sbom.cdx.json /opt/trtspec/
ENV HF_HOME=/models \
    HF_MODULES_CACHE=/cache/modules \
    TRITON_CACHE_DIR=/cache/triton \
    FLASHINFER_WORKSPACE_BASE=/cache/flashinfer \
    TRTSPEC_SERVE_TRTLLM_VERSION=${TRTLLM_VERSION} \
    PYTHONUNBUFFERED=1
WORKDIR /cache
VOLUME ["/models", "/cache"]
EXPOSE 8000
# for compose; Kubernetes does not read it. Loading takes up to two hours from a slow disk.
HEALTHCHECK --interval=30s --timeout=10s --start-period=2h --retries=3 \
    CMD ["python3", "-c", "import urllib.request as u; u.urlopen('http://127.0.0.1:8000/health', timeout=9)"]
STOPSIGNAL SIGTERM
# the base's own entrypoint stays: it prepares the driver's libraries, then runs the command
CMD ["trtspec", "--help"]
