# The scheduler of a cluster's jobs, whose work is done by Pods of the jobs' image. Neither Beam nor Torch.
ARG PYTHON=python:3.11.13-slim-bookworm

FROM ${PYTHON}
COPY requirements-scheduler.lock /opt/presage/
RUN python -m pip install --no-cache-dir --require-hashes --no-deps \
    --requirement /opt/presage/requirements-scheduler.lock
COPY dist /opt/presage/dist
RUN python -m pip install --no-cache-dir --no-deps --no-index --find-links /opt/presage/dist presage
ENV PYTHONDONTWRITEBYTECODE=1
USER 10001:10001
WORKDIR /tmp
ENTRYPOINT ["python", "-m", "presage.scheduler"]
CMD ["--help"]
