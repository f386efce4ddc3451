# All that the Pods of a scheduled job and of daily retraining run: builds, trainers, stores, `scheduler retrain`. CPU.
ARG PYTHON=python:3.11.13-slim-bookworm

FROM ${PYTHON}
COPY requirements-jobs.lock /opt/presage/
RUN python -m pip install --no-cache-dir --require-hashes --no-deps \
    --requirement /opt/presage/requirements-jobs.lock
COPY dist /opt/presage/dist
RUN python -m pip install --no-cache-dir --no-deps --no-index --find-links /opt/presage/dist presage
ENV PYTHONDONTWRITEBYTECODE=1 DO_NOT_TRACK=1 XDG_CACHE_HOME=/tmp/cache
USER 10001:10001
WORKDIR /tmp
ENTRYPOINT ["python", "-m"]
CMD ["presage.trainer", "--help"]
