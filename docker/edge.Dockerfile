# One edge: the API over HTTP. Neither torch nor a model is in this image; models come from the log.
FROM python:3.11-slim-bookworm

ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1 PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1
WORKDIR /src
COPY . .
RUN pip install --constraint constraints.txt ".[edge]" && useradd --system --uid 10001 headrace
WORKDIR /home/headrace
USER 10001

ENV HEADRACE_HOST=0.0.0.0
EXPOSE 8000
HEALTHCHECK --interval=5s --timeout=3s --start-period=20s \
  CMD ["python", "-c", "import urllib.request; urllib.request.urlopen('http://127.0.0.1:8000/health', timeout=2)"]
ENTRYPOINT ["headrace", "edge"]
