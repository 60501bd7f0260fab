# Quantization, calibration and head training: ModelOpt, whose pins clash with the engine's, in an image of its own.
#   docker build -f docker/quantize.Dockerfile -t trtspec:quantize .
# BASE by digest: docker buildx imagetools inspect docker.io/library/python:3.11.13-slim-bookworm prints it.
ARG BASE=docker.io/library/python:3.11.13-slim-bookworm

FROM ${BASE} AS build
ARG TORCH_INDEX=https://download.pytorch.org/whl/cu130
ARG TORCH_VERSION=2.13.0
WORKDIR /src
RUN python3 -m venv /opt/trtspec
ENV PATH=/opt/trtspec/bin:$PATH
COPY constraints.txt ./
RUN pip install --no-cache-dir --no-compile --index-url "${TORCH_INDEX}" -c constraints.txt "torch==${TORCH_VERSION}"
COPY LICENSE NOTICE README.md pyproject.toml ./
COPY trtspec trtspec
RUN pip install --no-cache-dir --no-compile -c constraints.txt ".[modelopt]"

FROM build AS sbom
ARG CYCLONEDX_VERSION=7.5.0
RUN python3 -m venv /sbom \
    && /sbom/bin/pip install --no-cache-dir --no-compile "cyclonedx-bom==${CYCLONEDX_VERSION}" \
    && /sbom/bin/cyclonedx-py environment /opt/trtspec/bin/python --output-reproducible -o /sbom.cdx.json

FROM ${BASE}
ARG BASE
ARG VERSION=0.1.0
ARG REVISION=unknown
LABEL org.opencontainers.image.title="trtspec with ModelOpt" \
      org.opencontainers.image.description="Quantization, calibration and head training of Kimi-K2 models" \
      org.opencontainers.image.licenses="Apache-2.0" \
      org.opencontainers.image.version="${VERSION}" \
      org.opencontainers.image.revision="${REVISION}" \
      org.opencontainers.image.base.name="${BASE}" \
      trtspec.sbom="/opt/trtspec/sbom.cdx.json"
RUN useradd --create-home --uid 1000 trtspec && mkdir /models /work && chown trtspec /models /work
COPY --from=build /opt/trtspec /opt/trtspec
COPY --from=sbom /sbom.cdx.json /opt/trtspec/
ENV PATH=/opt/trtspec/bin:$PATH \
    HF_HOME=/models \
    NVIDIA_VISIBLE_DEVICES=all \
    NVIDIA_DRIVER_CAPABILITIES=compute,utility \
    PYTHONDONTWRITEBYTECODE=1 \
    PYTHONUNBUFFERED=1
USER 1000
WORKDIR /work
VOLUME ["/models", "/work"]
# a job, not a server: healthy while its process lives
HEALTHCHECK NONE
STOPSIGNAL SIGTERM
ENTRYPOINT ["trtspec"]
CMD ["--help"]
