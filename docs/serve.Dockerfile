# `vitctl serve` of an ONNX file on a CPU: see serve.md. The context is a clone of the repository, with the file in its folder model/.
FROM python:3.12-slim
ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu
RUN pip install --no-cache-dir torch torchvision --index-url "$TORCH_INDEX"
COPY pyproject.toml README.md LICENSE /src/
COPY vitctl /src/vitctl
COPY recipes /src/recipes
RUN pip install --no-cache-dir '/src[serve]'
COPY model /model
USER 10001
EXPOSE 8000
HEALTHCHECK --start-period=60s \
  CMD python -c "import urllib.request as u; u.urlopen('http://127.0.0.1:8000/health', timeout=5)"
ENTRYPOINT ["vitctl", "serve", "--from", "/model/model.onnx", "--host", "0.0.0.0"]
