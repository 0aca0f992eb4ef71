# Image of embedder, for pods and for `docker run`. It runs as a user without rights, on a read-only root.
#
#     buildah build -t embedder:full .                                # all: embed, serve, Ray's cluster, JupyterLab
#     buildah build -t embedder:light --build-arg VARIANT=light .     # searches, plans, serves; without torch and Ray
#     buildah build -t embedder:vendor --build-arg BASE=nvcr.io/nvidia/pytorch:25.09-py3 --build-arg TORCH=base .
#
# Versions are those of constraints.txt and scripts/image/constraints.txt. What is inside: /opt/embedder/sbom.cdx.json.
# BASE is any Debian or Ubuntu with Python 3.11 or newer; scripts/image/build makes one by debootstrap where no registry is
# at hand. With TORCH=base the image's own torch, numpy and CUDA packages stay as they are, and pip chooses the others.
ARG BASE=docker.io/library/debian:bookworm-slim

# hadolint ignore=DL3006
FROM ${BASE} AS base
# wget: the probes that KubeRay adds to pods call it. Login shells, which it may start commands in, forget an image's
# PATH, but read /etc/profile.d. Debian's stable release keeps the versions, and its fixes come in.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install -y --no-install-recommends ca-certificates python3 wget \
    && rm -rf /var/lib/apt/lists/* \
    && echo "PATH=/opt/embedder/bin:\$PATH" > /etc/profile.d/embedder.sh \
    && groupadd --gid 10001 embedder \
    && useradd --uid 10001 --gid 10001 --home-dir /home/embedder --create-home --shell /usr/sbin/nologin embedder

FROM base AS build
ARG VARIANT=full
ARG TORCH=own
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install -y --no-install-recommends python3-venv \
    && rm -rf /var/lib/apt/lists/*
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1
WORKDIR /src
COPY constraints.txt scripts/image/requirements-*.txt ./
COPY scripts/image/constraints.txt image-constraints.txt
COPY pyproject.toml README.md LICENSE ./
COPY embedder embedder
COPY shards shards
COPY index index
RUN if [ "$TORCH" = base ]; then \
        python3 -m venv --system-site-packages /opt/embedder \
        && /opt/embedder/bin/pip list --format=freeze > base.txt \
        && grep -iE '^(torch|nvidia|cuda|triton|numpy)' base.txt > constraints.txt; \
    else \
        python3 -m venv /opt/embedder; \
    fi \
    && /opt/embedder/bin/pip install -c constraints.txt -c image-constraints.txt -r "requirements-${VARIANT}.txt"
RUN python3 -m venv /opt/sbom \
    && /opt/sbom/bin/pip install -c image-constraints.txt cyclonedx-bom \
    && /opt/sbom/bin/cyclonedx-py environment --output-reproducible --of JSON -o /opt/embedder/sbom.cdx.json \
        /opt/embedder/bin/python

FROM base
ARG VARIANT=full
ARG VERSION=0
ARG REVISION=unknown
LABEL org.opencontainers.image.title="embedder" \
    org.opencontainers.image.description="Embeds pictures, videos and captions on Ray, and searches them" \
    org.opencontainers.image.licenses="Apache-2.0 AND Unicode-3.0 AND CC-BY-SA-4.0" \
    org.opencontainers.image.version="${VERSION}" \
    org.opencontainers.image.revision="${REVISION}" \
    embedder.variant="${VARIANT}"
COPY --from=build /opt/embedder /opt/embedder
ENV PATH=/opt/embedder/bin:/usr/local/bin:/usr/bin:/bin \
    HOME=/home/embedder \
    PYTHONUNBUFFERED=1 \
    PYTHONDONTWRITEBYTECODE=1
USER 10001:10001
WORKDIR /home/embedder
# Whether the service answers, where it is what runs; of other commands, whether the installation starts.
HEALTHCHECK --interval=30s --timeout=10s --start-period=60s \
    CMD ["sh", "-c", "wget -q -O /dev/null http://127.0.0.1:8765/healthz || embedder --version"]
CMD ["embedder", "doctor"]
