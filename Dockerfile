# megatron-dynbatch over an image of your choice:
#
#   docker build --build-arg BASE_IMAGE=IMAGE --build-arg EXTRAS=megatron -t megatron-dynbatch .
#
# There is no default: the image decides CUDA, torch and Transformer Engine, and must have Python 3.12 or
# newer. NVIDIA's PyTorch images bring all of them (EXTRAS=torch then keeps their torch, megatron adds
# megatron-core); python:3.12-slim with EXTRAS= is enough where rollouts are written or planned.
ARG BASE_IMAGE

# hadolint ignore=DL3006
FROM ${BASE_IMAGE} AS build
COPY . /source
RUN python3 -m pip wheel --no-cache-dir --no-deps --wheel-dir /wheels /source

# hadolint ignore=DL3006
FROM ${BASE_IMAGE}
ARG EXTRAS=megatron
COPY --from=build /wheels /wheels
# What the image has (its torch) is kept where it is new enough.
RUN python3 -m pip install --no-cache-dir "$(ls /wheels/*.whl)${EXTRAS:+[$EXTRAS]}" \
    && rm -rf /wheels \
    && megatron-dynbatch --version
WORKDIR /workspace
ENTRYPOINT ["megatron-dynbatch"]
CMD ["--help"]
