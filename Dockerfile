# Two images from one source:
#   docker build --target operator -t pipemorph/operator:0.1.0 .
#   docker build --target trainer  -t pipemorph/trainer:0.1.0 .
# BASE is any image with Python >= 3.11 and its venv module; for the trainer on GPUs, one with CUDA.
# Without a registry in reach: --build-arg BASE=localhost/my-base.
ARG BASE=docker.io/library/python:3.12-slim

# --- operator: reconcile and ingest, no torch, nothing compiled ---------------------------------
FROM ${BASE} AS operator
ARG PIP_INDEX_URL=
WORKDIR /app
RUN python3 -m venv /opt/pipemorph
ENV PATH=/opt/pipemorph/bin:$PATH PYTHONPATH=/app PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1
COPY pyproject.toml ./
# The core's dependencies and those of the extra, from the one place that lists them.
RUN python -c "import tomllib; p = tomllib.load(open('pyproject.toml', 'rb'))['project']; \
print('\n'.join(p['dependencies'] + p['optional-dependencies']['operator']))" > /tmp/requirements.txt \
 && pip install --no-cache-dir -r /tmp/requirements.txt && rm /tmp/requirements.txt
COPY pipemorph ./pipemorph
COPY operator/pipemorph_operator ./pipemorph_operator
RUN python -m compileall -q pipemorph pipemorph_operator \
 && python -c "import pipemorph_operator.__main__, pipemorph_operator.ingest.__main__, sys; sys.exit('torch' in sys.modules)"
USER 65532:65532
CMD ["python", "-m", "pipemorph_operator", "--help"]

# --- the wheel, with the engine compiled --------------------------------------------------------
FROM ${BASE} AS wheel
ARG PIP_INDEX_URL=
RUN command -v c++ >/dev/null || (apt-get update && apt-get install -y --no-install-recommends g++ \
 && rm -rf /var/lib/apt/lists/*)
WORKDIR /src
RUN python3 -m venv /opt/build
COPY . .
RUN /opt/build/bin/pip wheel --no-cache-dir --no-deps -w /wheels .

# --- trainer: what runs in every rank -----------------------------------------------------------
FROM ${BASE} AS trainer
ARG PIP_INDEX_URL=
# Where torch comes from; https://download.pytorch.org/whl/cpu saves some GB where there is no GPU.
ARG TORCH_INDEX=
RUN python3 -m venv /opt/pipemorph
ENV PATH=/opt/pipemorph/bin:$PATH PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1
COPY --from=wheel /wheels /wheels
RUN wheel="$(ls /wheels/pipemorph-*.whl)" \
 && pip install --no-cache-dir ${TORCH_INDEX:+--extra-index-url "$TORCH_INDEX"} "$wheel[trainer]" \
 && rm -rf /wheels && python -c "import torch, pipemorph_trainer.agent"
WORKDIR /work
USER 65532:65532
CMD ["python", "-m", "pipemorph_trainer.preflight", "--help"]
