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
# Not in an environment that pip makes anew for each build: what is compiled could not be kept.
COPY release/locks/build.txt /locks/
RUN python3 -m venv /opt/build \
 && /opt/build/bin/pip install --no-cache-dir --no-deps --require-hashes -r /locks/build.txt
ENV PATH=/opt/build/bin:$PATH
COPY CMakeLists.txt LICENSE pyproject.toml ./
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
# Installed from outside, so that the image has no pip.
FROM ${BASE} AS operator-packages
ARG PIP_INDEX_URL=
RUN python3 -m venv /opt/pip && python3 -m venv --without-pip /opt/pipemorph
COPY release/locks/operator.txt /locks/
ARG INSTALL="/opt/pip/bin/pip --python /opt/pipemorph/bin/python install --no-cache-dir --no-deps"
RUN $INSTALL --require-hashes -r /locks/operator.txt
COPY --from=wheel /wheels /wheels
RUN $INSTALL /wheels/pipemorph-*.whl && /opt/pip/bin/pip --python /opt/pipemorph/bin/python check

FROM ${BASE} AS operator
# BASE may have a pip of its own.
RUN rm -rf /usr/local/bin/pip* /usr/local/lib/python3*/ensurepip \
  /usr/local/lib/python3*/site-packages/pip /usr/local/lib/python3*/site-packages/pip-*
COPY --from=operator-packages /opt/pipemorph /opt/pipemorph
ENV PATH=/opt/pipemorph/bin:$PATH PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1
RUN python -c "import pipemorph_operator.__main__, pipemorph_operator.ingest.__main__, sys; \
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
# torch, the gigabytes, in a layer that stays while only our own code changes. With BASE's torch goes
# BASE's numpy, if it has one.
COPY release/locks/numpy.txt release/locks/trainer.txt release/locks/trainer-torch.txt /locks/
ARG LOCKED="install --no-cache-dir --no-deps --require-hashes -r"
RUN case "$TORCH" in pip) site= ;; base) site=--system-site-packages ;; \
      *) echo "TORCH is $TORCH; expected pip or base" >&2; exit 1 ;; esac \
 && python3 -m venv $site /opt/pipemorph && cd /opt/pipemorph/bin \
 && if [ "$TORCH$TORCH_INDEX" = pip ]; then ./pip $LOCKED /locks/trainer-torch.txt; else \
      ./pip $LOCKED /locks/trainer.txt \
      && { ./python -c "import numpy" 2>/dev/null || ./pip $LOCKED /locks/numpy.txt; } \
      && { [ "$TORCH" = base ] || ./pip install --no-cache-dir --extra-index-url "$TORCH_INDEX" \
             "$(grep -o '^torch==[0-9.]*' /locks/trainer-torch.txt)"; }; fi
# `pipemorph doctor` reads MTUs by pyverbs, where the distribution's Python is that of BASE.
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
