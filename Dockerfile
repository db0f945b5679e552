# The server's image.
#
#   CPU   docker build -t npugrad:0.1.0-cpu .
#   NPU   docker build -t npugrad:0.1.0-910b-ubuntu22.04 \
#             --build-arg BASE=quay.io/ascend/cann:9.1.0-910b-ubuntu22.04-py3.12 \
#             --build-arg EXTRAS=server,npu \
#             --build-arg PIP_EXTRA_INDEX_URL="$PYTORCH_CPU_INDEX" .
#
# BASE needs Python 3.10 to 3.13 with venv, awk and install, and a C++17 compiler or one of apt-get, dnf and yum. In
# the vendor's CANN images the chip is part of the tag (910, 910b, a3) because the operators' kernels are inside.
# docs/guides/deploying.md says which fit and how to build offline.

ARG BASE=python:3.11.15-slim-bookworm

# ------------------------------------------------------------------------------------ build
FROM ${BASE} AS build

# Comma-separated extras of the package, as in pyproject.toml.
ARG EXTRAS=server
# pip's own settings. They exist in this stage only, so an index address never reaches the image's history.
ARG PIP_INDEX_URL
ARG PIP_EXTRA_INDEX_URL
ARG PIP_FIND_LINKS
ARG PIP_NO_INDEX
# 0 leaves the compiled CPU kernels out: no compiler is needed, and CPU devices run the slow reference.
ARG NPUGRAD_BUILD_KERNELS=1
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1

WORKDIR /src
COPY deploy/image/ deploy/image/

# The account, and the one directory it may write to. The runtime stage copies both: it needs no shell.
RUN sh deploy/image/account.sh && install -d -o 1000 -g 1000 /home/HwHiAiUser

RUN sh deploy/image/compiler.sh

# A CANN base holds Python packages that CANN itself imports (attrs, decorator, psutil, scipy, ...): the server's
# environment sees them. What is pinned here comes first. It has no pip of its own: what installs stays behind.
RUN python3 -m venv /opt/build && python3 -m venv --system-site-packages --without-pip /opt/npugrad

# Before the sources, so that an edit of the code does not fetch anything again.
RUN /opt/build/bin/pip install --require-hashes -r deploy/image/requirements-build.txt \
    && /opt/build/bin/pip --python /opt/npugrad install --require-hashes -r deploy/image/requirements-server.txt

COPY pyproject.toml README.md LICENSE ./
COPY protos/ protos/
COPY server/ server/
COPY client/ client/
RUN /opt/build/bin/pip wheel --no-build-isolation --no-deps --wheel-dir /dist . ./server \
    && wheel="$(echo /dist/npugrad-*.whl)" \
    && /opt/build/bin/pip --python /opt/npugrad install --constraint deploy/image/constraints-npu.txt \
        "${wheel}[${EXTRAS}]" /dist/npugrad_server-*.whl \
    && sh deploy/image/check.sh /opt/npugrad/bin/npugrad-server

# ---------------------------------------------------------------------------------- runtime
FROM ${BASE} AS runtime

LABEL org.opencontainers.image.title="npugrad" \
      org.opencontainers.image.description="Ascend aclnn backward operators as a gRPC service" \
      org.opencontainers.image.licenses="Apache-2.0"

COPY --from=build /etc/passwd /etc/group /etc/
COPY --from=build --chown=1000:1000 /home/HwHiAiUser /home/HwHiAiUser
COPY --from=build /opt/npugrad /opt/npugrad

# Everything that writes, writes under HOME; mount a volume there when the root file system is read-only. CANN puts
# kernel caches, logs (ASCEND_WORK_PATH/log) and dumps into these two, which must exist. Bytecode was compiled above.
ENV PATH=/opt/npugrad/bin:${PATH} \
    HOME=/home/HwHiAiUser \
    ASCEND_CACHE_PATH=/home/HwHiAiUser \
    ASCEND_WORK_PATH=/home/HwHiAiUser \
    TORCH_EXTENSIONS_DIR=/home/HwHiAiUser/.cache/torch_extensions \
    TORCH_DEVICE_BACKEND_AUTOLOAD=0 \
    PYTHONUNBUFFERED=1 \
    PYTHONDONTWRITEBYTECODE=1

WORKDIR /home/HwHiAiUser
USER 1000:1000
EXPOSE 50051 9464

# The server drains on SIGTERM. It is process 1, so no shell may stand between it and the signal. The CANN base's own
# entrypoint only sources set_env.sh; that image sets the same variables with ENV. No HEALTHCHECK: Kubernetes probes
# over HTTP, and the image has no curl.
STOPSIGNAL SIGTERM
ENTRYPOINT ["npugrad-server"]
CMD ["serve"]
