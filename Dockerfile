# Two images from one source:
#   docker build --target operator -t pipemorph/operator:0.1.0 .
#   docker build --target trainer  -t pipemorph/trainer:0.1.0 .
# BASE is any image with Python >= 3.11 and its venv module; for the trainer on GPUs, one with CUDA.
# Without a registry in reach: --build-arg BASE=localhost/my-base.
ARG BASE=python:3.12-slim

# --- the wheel of both, with the engine and the planner's search compiled -----------------------
FROM ${BASE} AS wheel
ARG PIP_INDEX_URL=
# A compiler and Python's headers, where BASE lacks them (a distribution's own Python does).
RUN command -v c++ >/dev/null || missing=g++; \
    python3 -c "import pathlib, sys, sysconfig; \
sys.exit(not pathlib.Path(sysconfig.get_paths()['include'], 'Python.h').exists())" || missing="$missing python3-dev"; \
    [ -z "$missing" ] || (apt-get update && apt-get install -y --no-install-recommends $missing \
 && rm -rf /var/lib/apt/lists/*)
WORKDIR /src
COPY pyproject.toml ./
# Not in an environment that pip makes anew for each build: what is compiled could not be kept.
RUN python3 -m venv /opt/build \
 && /opt/build/bin/python -c "import tomllib; print('\n'.join( \
tomllib.load(open('pyproject.toml', 'rb'))['build-system']['requires'] + ['cmake', 'ninja']))" > /tmp/requirements.txt \
 && /opt/build/bin/pip install --no-cache-dir -r /tmp/requirements.txt
ENV PATH=/opt/build/bin:$PATH
COPY CMakeLists.txt LICENSE ./
COPY csrc ./csrc
# What is compiled alone, in a layer that stays while only Python and README.md change.
RUN touch README.md && mkdir -p pipemorph trainer/pipemorph_trainer operator/pipemorph_operator \
 && pip wheel --no-build-isolation --no-cache-dir --no-deps -w /tmp/engine .
COPY README.md ./
COPY pipemorph ./pipemorph
COPY trainer/pipemorph_trainer ./trainer/pipemorph_trainer
COPY operator/pipemorph_operator ./operator/pipemorph_operator
RUN pip wheel --no-build-isolation --no-cache-dir --no-deps -w /wheels .

# --- operator: reconcile and ingest, which plans with the compiled search; no torch ---------------
FROM ${BASE} AS operator
ARG PIP_INDEX_URL=
RUN python3 -m venv /opt/pipemorph
ENV PATH=/opt/pipemorph/bin:$PATH PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1
COPY pyproject.toml /tmp/
# The core's dependencies and those of the extra, from the one place that lists them.
RUN python -c "import tomllib; p = tomllib.load(open('/tmp/pyproject.toml', 'rb'))['project']; \
print('\n'.join(p['dependencies'] + p['optional-dependencies']['operator']))" > /tmp/requirements.txt \
 && pip install --no-cache-dir -r /tmp/requirements.txt && rm /tmp/requirements.txt /tmp/pyproject.toml
COPY --from=wheel /wheels /wheels
RUN pip install --no-cache-dir --no-deps /wheels/pipemorph-*.whl \
 && python -c "import pipemorph_operator.__main__, pipemorph_operator.ingest.__main__, sys; \
from pipemorph.planning import _planner; sys.exit('torch' in sys.modules)"
WORKDIR /work
USER 65532:65532
CMD ["python", "-m", "pipemorph_operator", "--help"]

# --- trainer: what runs in every rank -----------------------------------------------------------
FROM ${BASE} AS trainer
ARG PIP_INDEX_URL=
# pip: torch is installed here. base: BASE brings it, as vendors' images do, or the node mounts it.
ARG TORCH=pip
# Another index where pip finds torch: one with builds for the CPU saves some GB without GPUs.
ARG TORCH_INDEX=
# The engine loads libibverbs when a job asks for RDMA; where BASE has it, it knows its devices best.
RUN python3 -c "import ctypes; ctypes.CDLL('libibverbs.so.1')" 2>/dev/null || (apt-get update \
 && apt-get install -y --no-install-recommends libibverbs1 ibverbs-providers \
 && rm -rf /var/lib/apt/lists/*)
# It authenticates by OpenSSL's libcrypto, which a Python with a copy of its own may lack beside it.
RUN python3 -c "import ctypes; ctypes.CDLL('libcrypto.so.3')" 2>/dev/null \
 || python3 -c "import ctypes; ctypes.CDLL('libcrypto.so.1.1')" 2>/dev/null || (apt-get update \
 && apt-get install -y --no-install-recommends libssl3 \
 && rm -rf /var/lib/apt/lists/*)
COPY pyproject.toml /tmp/
# torch, the gigabytes, in a layer that stays while only our own code changes.
RUN case "$TORCH" in pip) site= ;; base) site=--system-site-packages ;; \
      *) echo "TORCH is $TORCH; expected pip or base" >&2; exit 1 ;; esac \
 && python3 -m venv $site /opt/pipemorph \
 && /opt/pipemorph/bin/python -c "import sys, tomllib; p = tomllib.load(open('/tmp/pyproject.toml', 'rb'))['project']; \
print('\n'.join(r for r in p['dependencies'] + p['optional-dependencies']['trainer'] \
if sys.argv[1] == 'pip' or not r.startswith('torch')))" "$TORCH" > /tmp/requirements.txt \
 && /opt/pipemorph/bin/pip install --no-cache-dir ${TORCH_INDEX:+--extra-index-url "$TORCH_INDEX"} \
      -r /tmp/requirements.txt && rm /tmp/requirements.txt /tmp/pyproject.toml
# `pipemorph fabric check` probes with pyverbs, which the distribution's Python runs if ours is another.
RUN /usr/bin/python3 -c "import pyverbs.device" 2>/dev/null || (apt-get update \
 && apt-get install -y --no-install-recommends python3-pyverbs \
 && rm -rf /var/lib/apt/lists/*)
ENV PATH=/opt/pipemorph/bin:$PATH PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1
COPY --from=wheel /wheels /wheels
RUN pip install --no-cache-dir --no-deps /wheels/pipemorph-*.whl \
 && python -c "import pipemorph_trainer.agent, pipemorph.planning._planner; \
from pipemorph_trainer import _engine; print(_engine.crypto_library())" \
 && { [ "$TORCH" = base ] || python -c "import torch, pipemorph_trainer"; }
WORKDIR /work
# The user has no entry in /etc/passwd: who asks for its name or its home must get an answer.
ENV USER=pipemorph HOME=/tmp
USER 65532:65532
CMD ["python", "-m", "pipemorph_trainer.preflight", "--help"]
