# docker build --tag hf-recurrent .
# With --build-arg PIP_EXTRA_INDEX_URL=ADDRESS, torch can be its smaller build for CPUs, from the index of such builds.
# docker run --rm --volume "$PWD:/work" hf-recurrent pretrain --corpus notes/ --output_dir runs/notes
FROM python:3.12-slim AS build
# The kernels for CPUs are compiled here, so that the image has no compiler.
RUN apt-get update && apt-get install --yes --no-install-recommends gcc libc6-dev && rm -rf /var/lib/apt/lists/*
COPY . /source
RUN pip wheel --no-cache-dir --no-deps --wheel-dir /wheels /source

FROM python:3.12-slim
ARG PIP_EXTRA_INDEX_URL
RUN --mount=type=bind,from=build,source=/wheels,target=/wheels \
    pip install --no-cache-dir "$(ls /wheels/*.whl)[data,plots]"
RUN useradd --create-home user
USER user
WORKDIR /work
ENTRYPOINT ["hf-recurrent"]
CMD ["--help"]
