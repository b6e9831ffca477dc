# The service and its workers. Build from the root of the repository:
#   docker build -f docker/service.Dockerfile -t optpipe-service .
ARG PYTHON_IMAGE=python:3.12.12-slim-bookworm

FROM ${PYTHON_IMAGE} AS build
WORKDIR /src
# As a variable it holds for the packages that build this one, too.
ENV PIP_CONSTRAINT=/src/constraints.txt PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1
COPY constraints.txt pyproject.toml README.md ./
COPY optpipe optpipe
COPY solver solver
COPY api api
COPY instances instances
RUN python -m venv /opt/optpipe && /opt/optpipe/bin/pip install '.[serve]'

FROM ${PYTHON_IMAGE}
RUN useradd --system --create-home --uid 10001 optpipe \
    && install --directory --owner optpipe /var/cache/optpipe
COPY --from=build /opt/optpipe /opt/optpipe
ENV PATH=/opt/optpipe/bin:$PATH \
    PYTHONUNBUFFERED=1 \
    NUMBA_CACHE_DIR=/var/cache/optpipe \
    OPTPIPE_HOST=0.0.0.0 \
    OPTPIPE_LOG_JSON=true
USER 10001
# Compiled for the processor that builds; another one compiles again at its first solve.
RUN python -m solver.warm_up
EXPOSE 8000
HEALTHCHECK --interval=10s --timeout=3s --start-period=60s --retries=3 \
    CMD ["python", "-c", "import urllib.request; urllib.request.urlopen('http://127.0.0.1:8000/healthz', timeout=2)"]
ENTRYPOINT ["optpipe"]
CMD ["serve"]
