# Builds datasets: Beam's workers on Flink and Dataflow, and `python -m pipelines` with another entry point. No Torch.
ARG PYTHON=python:3.11.13-slim-bookworm
ARG BEAM=apache/beam_python3.11_sdk:2.77.0

FROM ${BEAM} AS beam

FROM ${PYTHON} AS kernels
RUN apt-get update && apt-get install --yes --no-install-recommends g++ && rm -rf /var/lib/apt/lists/*
COPY schemas /opt/presage/schemas
RUN cd /opt/presage && python -m schemas.kernels.build

FROM ${PYTHON}
COPY requirements-pipelines.lock /opt/presage/
RUN python -m pip install --no-cache-dir --require-hashes --no-deps \
    --requirement /opt/presage/requirements-pipelines.lock
COPY --from=beam /opt/apache/beam /opt/apache/beam
COPY --from=kernels /opt/presage/schemas /opt/presage/schemas
COPY pipelines /opt/presage/pipelines
# Instead of `boot`, beside a task manager of Flink.
COPY deploy/flink/worker_pool.py /opt/presage/
ENV PYTHONPATH=/opt/presage PYTHONDONTWRITEBYTECODE=1 DO_NOT_TRACK=1
USER 10001:10001
WORKDIR /tmp
ENTRYPOINT ["/opt/apache/beam/boot"]
