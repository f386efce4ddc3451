# Builds on Dataflow from a template: its launcher and its workers. `LAUNCHER` is Google's image of the Python template launcher.
ARG PYTHON=python:3.11.13-slim-bookworm
ARG BEAM=apache/beam_python3.11_sdk:2.77.0
ARG LAUNCHER

FROM ${BEAM} AS beam

FROM ${LAUNCHER} AS launcher

FROM ${PYTHON}
COPY requirements-dataflow.lock /opt/presage/
RUN python -m pip install --no-cache-dir --require-hashes --no-deps \
    --requirement /opt/presage/requirements-dataflow.lock
COPY --from=beam /opt/apache/beam /opt/apache/beam
COPY --from=launcher /opt/google/dataflow/python_template_launcher /opt/google/dataflow/python_template_launcher
COPY dist /opt/presage/dist
RUN python -m pip install --no-cache-dir --no-deps --no-index --find-links /opt/presage/dist presage
COPY deploy/dataflow/template.py /opt/presage/
ENV PYTHONDONTWRITEBYTECODE=1 DO_NOT_TRACK=1 FLEX_TEMPLATE_PYTHON_PY_FILE=/opt/presage/template.py
USER 10001:10001
WORKDIR /tmp
ENTRYPOINT ["/opt/apache/beam/boot"]
