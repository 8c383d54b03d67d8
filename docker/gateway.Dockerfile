# The gateway: taut[service,redis,otel], its hot path compiled; neither torch nor pip nor a compiler. See docker/README.md.
ARG BASE_IMAGE=python:3.11-slim-bookworm@sha256:a36c24f9cbdf4fd0f52d67f0823eeac19c2028c637cecc392d97f980d4fec56b

# Empty: --build-context wheelhouse=DIR puts wheels here for builds that reach no package index.
FROM scratch AS wheelhouse

# Only here is a C compiler. What this stage reads is copied by name, so that it is not run again for a change elsewhere.
FROM ${BASE_IMAGE} AS compiled
# 0 leaves it out: the same gateway in Python alone.
ARG TAUT_COMPILE=1
# hadolint ignore=DL3008
RUN if [ "$TAUT_COMPILE" = 1 ]; then \
      apt-get update -qq \
      && apt-get install -y -qq --no-install-recommends gcc libc6-dev \
      && if [ -z "$(find /usr/local/include /usr/include -name Python.h)" ]; then \
           apt-get install -y -qq --no-install-recommends python3-dev; fi \
      && rm -rf /var/lib/apt/lists/*; fi
WORKDIR /src
COPY pyproject.toml ./
COPY docker/install_locked.sh docker/
COPY requirements/build.txt requirements/compile.txt requirements/service.txt requirements/otel.txt requirements/
COPY service service
RUN --mount=type=secret,id=pip_conf,target=/etc/pip.conf \
    --mount=type=bind,from=wheelhouse,target=/wheelhouse \
    docker/install_locked.sh compiled /compiled requirements/otel.txt requirements/compile.txt

FROM ${BASE_IMAGE} AS taut
WORKDIR /src
COPY . .
# Nothing where the stage above compiled nothing; TAUT_COMPILE=1 puts what is there into the wheel.
COPY --from=compiled /compiled .
RUN --mount=type=secret,id=pip_conf,target=/etc/pip.conf \
    --mount=type=bind,from=wheelhouse,target=/wheelhouse \
    TAUT_COMPILE=1 docker/install_locked.sh taut /installed requirements/build.txt

FROM ${BASE_IMAGE}
# The locks stay in the image: what it was made from, and part of the cache's key.
COPY requirements/service.txt requirements/otel.txt docker/install_locked.sh /opt/lock/
RUN --mount=type=secret,id=pip_conf,target=/etc/pip.conf \
    --mount=type=bind,from=wheelhouse,target=/wheelhouse \
    /opt/lock/install_locked.sh locked /opt/lock/otel.txt
# tini is process 1: it forwards SIGTERM from the first moment on, before Python has a handler.
# The base image's own pip goes: nothing is installed into a running container.
# apt takes what Debian has on the day: the image says which versions those were, and docker/build.py --like compares.
# hadolint ignore=DL3008
RUN apt-get update -qq \
    && apt-get install -y -qq --no-install-recommends tini \
    && dpkg-query --show --showformat='${Package}=${Version}\n' > /opt/lock/debian-packages.txt \
    && apt-get clean \
    && rm -rf /var/lib/apt/lists/* /usr/local/bin/pip* /usr/local/lib/python3*/site-packages/pip* \
    && groupadd --gid 10001 taut \
    && useradd --uid 10001 --gid 10001 --home-dir /nonexistent --no-create-home --shell /usr/sbin/nologin taut \
    && install -d -o 10001 -g 10001 /etc/taut /var/lib/taut/rollout
COPY --from=taut /installed/opt/taut /opt/taut
ENV PATH=/opt/taut/bin:$PATH \
    PYTHONSAFEPATH=1 \
    PYTHONUNBUFFERED=1 \
    PYTHONDONTWRITEBYTECODE=1 \
    TAUT_GATEWAY_PORT=8000
USER 10001:10001
WORKDIR /
EXPOSE 8000
ENTRYPOINT ["tini", "--", "taut-gateway"]
CMD ["--config", "/etc/taut/gateway.yaml"]
HEALTHCHECK --interval=10s --timeout=5s --start-period=30s CMD ["taut-healthcheck"]
ARG BASE_IMAGE
ARG VERSION=unknown
ARG REVISION=unknown
LABEL org.opencontainers.image.title="taut gateway" \
      org.opencontainers.image.description="OpenAI-compatible gateway in front of vLLM workers that serve compressed models" \
      org.opencontainers.image.licenses="Apache-2.0" \
      org.opencontainers.image.version="${VERSION}" \
      org.opencontainers.image.revision="${REVISION}" \
      org.opencontainers.image.base.name="${BASE_IMAGE}"
