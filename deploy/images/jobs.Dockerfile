# All that the Pods of a scheduled job and of daily retraining run: builds, trainers, stores, `scheduler retrain`. CPU.
ARG PYTHON=python:3.11.13-slim-bookworm

FROM ${PYTHON}
# The trainer compiles its kernels for the processor that it runs on; with `train.kernels: torch` this line can go.
RUN apt-get update && apt-get install --yes --no-install-recommends g++ && rm -rf /var/lib/apt/lists/*
COPY requirements-jobs.lock /opt/presage/
RUN python -m pip install --no-cache-dir --require-hashes --no-deps \
    --requirement /opt/presage/requirements-jobs.lock
COPY schemas /opt/presage/schemas
COPY pipelines /opt/presage/pipelines
COPY trainer /opt/presage/trainer
COPY scheduler /opt/presage/scheduler
ENV PYTHONPATH=/opt/presage PYTHONDONTWRITEBYTECODE=1 DO_NOT_TRACK=1 XDG_CACHE_HOME=/tmp/cache
USER 10001:10001
WORKDIR /tmp
ENTRYPOINT ["python", "-m"]
CMD ["trainer", "--help"]
