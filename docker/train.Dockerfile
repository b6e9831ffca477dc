# Training by a schedule. Build from the root of the repository, for other drivers on another base:
#   docker build -f docker/train.Dockerfile --build-arg CUDA_IMAGE=nvidia/cuda:12.6.3-base-ubuntu24.04 -t optpipe-train .
# The wheel of torch brings the CUDA libraries; the base need only let the driver in.
ARG CUDA_IMAGE=nvidia/cuda:12.8.1-base-ubuntu24.04

FROM ${CUDA_IMAGE}
# Distributions keep one version of a package: the version of the base pins these.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends python3 python3-venv \
    && rm -rf /var/lib/apt/lists/*
WORKDIR /src
ENV PIP_CONSTRAINT=/src/constraints.txt PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1
COPY constraints.txt pyproject.toml README.md ./
COPY optpipe optpipe
COPY solver solver
COPY api api
COPY instances instances
RUN python3 -m venv /opt/optpipe && /opt/optpipe/bin/pip install '.[train]'
RUN useradd --system --create-home --uid 10001 optpipe \
    && install --directory --owner optpipe /var/cache/optpipe /work
ENV PATH=/opt/optpipe/bin:$PATH PYTHONUNBUFFERED=1 NUMBA_CACHE_DIR=/var/cache/optpipe
USER 10001
WORKDIR /work
# A run that ends by itself has no health to ask for.
HEALTHCHECK NONE
ENTRYPOINT ["optpipe"]
CMD ["train", "--help"]
