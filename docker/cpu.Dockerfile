# The reference backend on a CPU, with kimi-nano in it: for trying and for continuous integration.
#   docker build -f docker/cpu.Dockerfile -t trtspec:cpu .
# BASE by digest: docker buildx imagetools inspect docker.io/library/python:3.11.13-slim-bookworm prints it.
ARG BASE=docker.io/library/python:3.11.13-slim-bookworm

FROM ${BASE} AS build
ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu
ARG TORCH_VERSION=2.13.0
WORKDIR /src
RUN python3 -m venv /opt/trtspec
ENV PATH=/opt/trtspec/bin:$PATH
COPY constraints.txt ./
# its own layer: it is most of the image and seldom changes
RUN pip install --no-cache-dir --no-compile --index-url "${TORCH_INDEX}" -c constraints.txt "torch==${TORCH_VERSION}"
COPY LICENSE NOTICE README.md pyproject.toml ./
COPY trtspec trtspec
RUN pip install --no-cache-dir --no-compile -c constraints.txt ".[reference]" \
    && ln -s "$(python3 -I -c 'from trtspec.data_files import DATA; print(DATA / "kimi-nano")')" /opt/kimi-nano \
    && ln -s "$(python3 -I -c 'from trtspec.data_files import DATA; print(DATA / "kimi-nano-eagle3")')" /opt/kimi-nano-eagle3

FROM build AS sbom
ARG CYCLONEDX_VERSION=7.5.0
RUN python3 -m venv /sbom \
    && /sbom/bin/pip install --no-cache-dir --no-compile "cyclonedx-bom==${CYCLONEDX_VERSION}" \
    && /sbom/bin/cyclonedx-py environment /opt/trtspec/bin/python --output-reproducible -o /sbom.cdx.json

FROM ${BASE}
ARG BASE
ARG VERSION=0.1.0
ARG REVISION=unknown
LABEL org.opencontainers.image.title="trtspec, reference backend" \
      org.opencontainers.image.description="Kimi-K2 with Eagle3 speculative decoding in plain PyTorch, with a small model" \
      org.opencontainers.image.licenses="Apache-2.0" \
      org.opencontainers.image.version="${VERSION}" \
      org.opencontainers.image.revision="${REVISION}" \
      org.opencontainers.image.base.name="${BASE}" \
      trtspec.sbom="/opt/trtspec/sbom.cdx.json"
RUN useradd --create-home --uid 1000 trtspec && mkdir /models && chown trtspec /models
COPY --from=build /opt /opt
COPY --from=sbom /sbom.cdx.json /opt/trtspec/
ENV PATH=/opt/trtspec/bin:$PATH \
    HF_HOME=/models \
    PYTHONDONTWRITEBYTECODE=1 \
    PYTHONUNBUFFERED=1
USER 1000
WORKDIR /home/trtspec
VOLUME /models
EXPOSE 8000
HEALTHCHECK --interval=10s --timeout=5s --start-period=60s --retries=3 \
    CMD ["python3", "-c", "import urllib.request as u; u.urlopen('http://127.0.0.1:8000/health', timeout=4)"]
STOPSIGNAL SIGTERM
ENTRYPOINT ["trtspec"]
CMD ["serve", "/opt/kimi-nano", "--head", "/opt/kimi-nano-eagle3", "--backend", "reference", "--host", "0.0.0.0"]
