# The pipeline without vLLM: taut model fetch, compress, validate. See docker/README.md.
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
COPY requirements/toolbox.txt /opt/lock/
RUN --mount=type=secret,id=pip_conf,target=/etc/pip.conf \
    --mount=type=bind,from=wheelhouse,target=/wheelhouse \
    /opt/lock/install_locked.sh locked /opt/lock/toolbox.txt
# tini is process 1: it forwards SIGTERM, which Python as process 1 would ignore.
# A tmpfs takes the mode of the directory it is mounted on, hence 1777.
# The base image's own pip goes: nothing is installed into a running container.
# apt takes what Debian has on the day: the image says which versions those were, and docker/build.py --like compares.
# hadolint ignore=DL3008
RUN apt-get update -qq \
    && apt-get install -y -qq --no-install-recommends tini \
    && dpkg-query --show --showformat='${Package}=${Version}\n' > /opt/lock/debian-packages.txt \
    && apt-get clean \
    && rm -rf /var/lib/apt/lists/* /usr/local/bin/pip* /usr/local/lib/python3*/site-packages/pip* \
    && groupadd --gid 10001 taut \
    && useradd --uid 10001 --gid 10001 --home-dir /scratch --no-create-home --shell /usr/sbin/nologin taut \
    && install -d -o 10001 -g 10001 /models /etc/taut \
    && install -d -o 10001 -g 10001 -m 1777 /scratch /reports
COPY --from=taut /installed/opt/taut /opt/taut
ENV PATH=/opt/taut/bin:$PATH \
    PYTHONSAFEPATH=1 \
    PYTHONUNBUFFERED=1 \
    PYTHONDONTWRITEBYTECODE=1 \
    TAUT_HOME=/models \
    HOME=/scratch
USER 10001:10001
WORKDIR /
ENTRYPOINT ["tini", "--", "taut"]
CMD ["--help"]
# A job: it ends, and its exit code says how.
HEALTHCHECK NONE
ARG BASE_IMAGE
ARG VERSION=unknown
ARG REVISION=unknown
LABEL org.opencontainers.image.title="taut toolbox" \
      org.opencontainers.image.description="Fetches, compresses and validates models; exit codes are verdicts" \
      org.opencontainers.image.licenses="Apache-2.0" \
      org.opencontainers.image.version="${VERSION}" \
      org.opencontainers.image.revision="${REVISION}" \
      org.opencontainers.image.base.name="${BASE_IMAGE}"
