# A worker without a GPU: vLLM for CPUs with taut's kernels and the `taut` command. See docker/README.md.
ARG BASE_IMAGE=python:3.11-slim-bookworm@sha256:a36c24f9cbdf4fd0f52d67f0823eeac19c2028c637cecc392d97f980d4fec56b

# Empty: --build-context wheelhouse=DIR puts wheels here for builds that reach no package index.
FROM scratch AS wheelhouse

FROM ${BASE_IMAGE} AS taut
WORKDIR /src
COPY . .
RUN --mount=type=secret,id=pip_conf,target=/etc/pip.conf \
    --mount=type=bind,from=wheelhouse,target=/wheelhouse \
    docker/install_locked.sh taut /installed requirements/build.txt

FROM ${BASE_IMAGE}
# The locks stay in the image: what it was made from, and part of the cache's key.
COPY requirements/service.txt requirements/deploy.txt requirements/torch-cpu.txt requirements/torch.txt docker/install_locked.sh /opt/lock/
# Up to here worker-cpu.Dockerfile and toolbox.Dockerfile are the same, so that their images share this layer.
ARG TAUT_TORCH_INDEX=""
RUN --mount=type=secret,id=pip_conf,target=/etc/pip.conf \
    --mount=type=bind,from=wheelhouse,target=/wheelhouse \
    /opt/lock/install_locked.sh locked torch /opt/lock/deploy.txt
COPY requirements/cpu.txt /opt/lock/
RUN --mount=type=secret,id=pip_conf,target=/etc/pip.conf \
    --mount=type=bind,from=wheelhouse,target=/wheelhouse \
    /opt/lock/install_locked.sh locked /opt/lock/cpu.txt
# tini is process 1: it forwards SIGTERM from the first moment on and reaps what vLLM leaves behind.
# g++ and Python's headers: vLLM compiles for this very CPU when it starts. libnuma1: it binds threads to cores.
# A tmpfs takes the mode of the directory it is mounted on, hence 1777.
# The base image's own pip goes: nothing is installed into a running container.
# apt takes what Debian has on the day: the image says which versions those were, and docker/build.py --like compares.
# hadolint ignore=DL3008
RUN apt-get update -qq \
    && apt-get install -y -qq --no-install-recommends g++ libnuma1 tini \
    && if [ -z "$(find /usr/local/include /usr/include -name Python.h)" ]; then \
         apt-get install -y -qq --no-install-recommends python3-dev; fi \
    && dpkg-query --show --showformat='${Package}=${Version}\n' > /opt/lock/debian-packages.txt \
    && apt-get clean \
    && rm -rf /var/lib/apt/lists/* /usr/local/bin/pip* /usr/local/lib/python3*/site-packages/pip* \
    && groupadd --gid 10001 taut \
    && useradd --uid 10001 --gid 10001 --home-dir /cache --no-create-home --shell /usr/sbin/nologin taut \
    && install -d -o 10001 -g 10001 /models \
    && install -d -o 10001 -g 10001 -m 1777 /cache /compile-cache
COPY --chmod=0755 docker/worker_healthcheck.py /usr/local/bin/taut-worker-healthcheck
COPY --from=taut /installed/opt/taut /opt/taut
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
HEALTHCHECK --interval=10s --timeout=5s --start-period=600s CMD ["taut-worker-healthcheck"]
ARG BASE_IMAGE
ARG VERSION=unknown
ARG REVISION=unknown
LABEL org.opencontainers.image.title="taut worker (CPU)" \
      org.opencontainers.image.description="vLLM on CPUs with taut's kernels, serving one compressed checkpoint" \
      org.opencontainers.image.licenses="Apache-2.0" \
      org.opencontainers.image.version="${VERSION}" \
      org.opencontainers.image.revision="${REVISION}" \
      org.opencontainers.image.base.name="${BASE_IMAGE}"
