# An image for nodes with H100 GPUs: CUDA, the network libraries, and hybridtron with all extras that runs need.
# It has been linted, and neither built nor run.
#
#     docker build --tag hybridtron .
#     docker build --tag hybridtron --build-arg GPU_EXTRAS="te,kernels,dali" .
#
# The job script of `hybridtron submit` starts it with Pyxis or Apptainer (cluster.container.image, docs/slurm.md).
FROM nvidia/cuda:13.0.1-cudnn-devel-ubuntu24.04

# Versions of system packages are those of the base image's release.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends \
        build-essential git ibverbs-providers libibverbs1 librdmacm1 ninja-build python3 python3-dev python3-venv \
    && rm -rf /var/lib/apt/lists/*

ENV VIRTUAL_ENV=/opt/venv
ENV PATH="${VIRTUAL_ENV}/bin:${PATH}"
# Ubuntu's pip 24.0 knows no --group, which came with 25.1; setuptools and wheel are what --no-build-isolation builds with.
RUN python3 -m venv "${VIRTUAL_ENV}" \
    && pip install --no-cache-dir --upgrade "pip>=25.1" "setuptools>=77" "wheel>=0.45" \
    && pip install --no-cache-dir "torch==2.13.0"

WORKDIR /opt/hybridtron
COPY . .
# Ranges of versions are in pyproject.toml. mosaicml-streaming pins packages that are not needed here.
# hadolint ignore=DL3013
RUN pip install --no-cache-dir ".[prepare,plot,export,metrics,mlflow,tasks,s3,streaming]" \
    && pip install --no-cache-dir --no-deps --group without-dependencies

# Extras with packages for GPUs. Most are compiled here against torch, which takes long, and all are optional.
ARG GPU_EXTRAS=""
# hadolint ignore=DL3013
RUN if [ -n "${GPU_EXTRAS}" ]; then MAX_JOBS=8 pip install --no-cache-dir --no-build-isolation ".[${GPU_EXTRAS}]"; fi

WORKDIR /work
CMD ["hybridtron", "doctor"]
