# The scheduler of a cluster's jobs, whose work is done by Pods of the jobs' image. Neither Beam nor Torch.
ARG PYTHON=python:3.11.13-slim-bookworm

FROM ${PYTHON} AS kernels
RUN apt-get update && apt-get install --yes --no-install-recommends g++ && rm -rf /var/lib/apt/lists/*
COPY schemas /opt/presage/schemas
RUN cd /opt/presage && python -m schemas.kernels.build

FROM ${PYTHON}
COPY requirements-scheduler.lock /opt/presage/
RUN python -m pip install --no-cache-dir --require-hashes --no-deps \
    --requirement /opt/presage/requirements-scheduler.lock
COPY --from=kernels /opt/presage/schemas /opt/presage/schemas
COPY scheduler /opt/presage/scheduler
ENV PYTHONPATH=/opt/presage PYTHONDONTWRITEBYTECODE=1
USER 10001:10001
WORKDIR /tmp
ENTRYPOINT ["python", "-m", "scheduler"]
CMD ["--help"]
