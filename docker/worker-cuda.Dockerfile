# A worker for NVIDIA GPUs: vLLM's own image with taut's kernels and the `taut` command. See docker/README.md.
ARG BASE_IMAGE=vllm/vllm-openai:v0.26.0@sha256:ffb2d59b1c059a5bd8d781320c9f5189de8293693b7d95da54befddaa54abf52
ARG BUILD_IMAGE=python:3.11-slim-bookworm@sha256:a36c24f9cbdf4fd0f52d67f0823eeac19c2028c637cecc392d97f980d4fec56b

# Empty: --build-context wheelhouse=DIR puts wheels here for builds that reach no package index.
FROM scratch AS wheelhouse

# taut is pure Python: what one CPython installs serves another.
FROM ${BUILD_IMAGE} AS taut
WORKDIR /src
COPY . .
RUN --mount=type=secret,id=pip_conf,target=/etc/pip.conf \
    --mount=type=bind,from=wheelhouse,target=/wheelhouse \
    docker/install_locked.sh taut /installed requirements/build.txt \
    && mkdir /site \
    && mv /installed/opt/taut/lib/python3.11/site-packages/* /site

FROM ${BASE_IMAGE}
# tini is process 1: it forwards SIGTERM from the first moment on and reaps what vLLM leaves behind.
# A tmpfs takes the mode of the directory it is mounted on, hence 1777.
# apt takes what Debian has on the day: the image says which versions those were, and docker/build.py --like compares.
# hadolint ignore=DL3008
RUN apt-get update -qq \
    && apt-get install -y -qq --no-install-recommends tini \
    && mkdir /opt/lock \
    && dpkg-query --show --showformat='${Package}=${Version}\n' > /opt/lock/debian-packages.txt \
    && apt-get clean \
    && rm -rf /var/lib/apt/lists/* \
    && groupadd --gid 10001 taut \
    && useradd --uid 10001 --gid 10001 --home-dir /cache --no-create-home --shell /usr/sbin/nologin taut \
    && install -d -o 10001 -g 10001 /models \
    && install -d -o 10001 -g 10001 -m 1777 /cache /compile-cache
COPY --from=taut /installed/opt/taut/bin /opt/taut/bin
COPY --from=taut /site /opt/taut/site
# Everything of the image stays as vLLM's people tested it: taut lies beside it, in an environment that sees both. The last
# lines say at once if another BASE_IMAGE lacks vLLM or something that `taut worker` imports.
RUN python3 -m venv --without-pip --system-site-packages /opt/taut \
    && echo /opt/taut/site > "$(/opt/taut/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/taut.pth" \
    && /opt/taut/bin/python -m compileall -q /opt/taut/site \
    && /opt/taut/bin/python -c 'from importlib.metadata import version; print("vllm", version("vllm"), "taut", version("taut"))' \
    && /opt/taut/bin/taut worker --help > /dev/null
COPY --chmod=0755 docker/worker_healthcheck.py /usr/local/bin/taut-worker-healthcheck
ENV PATH=/opt/taut/bin:$PATH \
    PYTHONSAFEPATH=1 \
    PYTHONUNBUFFERED=1 \
    PYTHONDONTWRITEBYTECODE=1 \
    TAUT_HOME=/models \
    TAUT_WORKER_PORT=8000 \
    HOME=/cache \
    VLLM_CACHE_ROOT=/cache/vllm \
    TRITON_CACHE_DIR=/cache/triton \
    TORCHINDUCTOR_CACHE_DIR=/cache/inductor
USER 10001:10001
WORKDIR /
EXPOSE 8000
ENTRYPOINT ["tini", "--", "taut"]
CMD ["worker", "--help"]
HEALTHCHECK --interval=10s --timeout=5s --start-period=1800s CMD ["taut-worker-healthcheck"]
ARG BASE_IMAGE
ARG VERSION=unknown
ARG REVISION=unknown
LABEL org.opencontainers.image.title="taut worker (CUDA)" \
      org.opencontainers.image.description="vLLM on NVIDIA GPUs with taut's Triton kernels, serving one compressed checkpoint" \
      org.opencontainers.image.licenses="Apache-2.0" \
      org.opencontainers.image.version="${VERSION}" \
      org.opencontainers.image.revision="${REVISION}" \
      org.opencontainers.image.base.name="${BASE_IMAGE}"
