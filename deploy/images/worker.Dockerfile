# Builds datasets: Beam's workers on Flink and Dataflow, and `python -m presage.pipelines` with another entry point. No Torch.
ARG PYTHON=python:3.11.13-slim-bookworm
ARG BEAM=apache/beam_python3.11_sdk:2.77.0

FROM ${BEAM} AS beam

FROM ${PYTHON}
COPY requirements-pipelines.lock /opt/presage/
RUN python -m pip install --no-cache-dir --require-hashes --no-deps \
    --requirement /opt/presage/requirements-pipelines.lock
COPY --from=beam /opt/apache/beam /opt/apache/beam
COPY dist /opt/presage/dist
RUN python -m pip install --no-cache-dir --no-deps --no-index --find-links /opt/presage/dist presage
# Instead of `boot`, beside a task manager of Flink.
COPY deploy/flink/worker_pool.py /opt/presage/
ENV PYTHONDONTWRITEBYTECODE=1 DO_NOT_TRACK=1
USER 10001:10001
WORKDIR /tmp
ENTRYPOINT ["/opt/apache/beam/boot"]
