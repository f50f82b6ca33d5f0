# A node that trains, on a CPU. docs/testbed.md, "Docker", has how to use it; docker-compose.yml has other builds of it.
#
#     docker build -t chaosnet .
#     docker run --rm --init --network host -e CHAOSNET_JOIN=TOKEN chaosnet    # TOKEN: of `chaosnet invite`
#
# It listens on all interfaces, so it wants a key: an invite gives it one (a volume at /home/node/.config/chaosnet keeps it).

ARG BASE=python:3.11-slim-bookworm

FROM ${BASE} AS packages
RUN python3 -m venv /opt/chaosnet
ENV PATH=/opt/chaosnet/bin:$PATH PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1
# For whoever has an index of his own. The image does not get to know it: it is an argument of this stage only.
ARG PIP_INDEX_URL

# torch first: it is most of the image and changes least. Its build is named, because the one without a name brings
# CUDA along (gigabytes). A wheel of it that lies in wheels/ is taken; else PyTorch's own index is asked.
ARG TORCH_VERSION=
ARG TORCH_BUILD=+cpu
ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu
# What an accelerator needs beside torch, e.g. torch-npu.
ARG EXTRA_PACKAGES=
COPY constraints.txt wheel[s] /wheels/
RUN pinned="$(sed -n 's/^torch==//p' /wheels/constraints.txt)" \
 && torch="torch==${TORCH_VERSION:-$pinned}${TORCH_BUILD}" \
 && sed "s/^torch==.*/$torch/" /wheels/constraints.txt > /constraints.txt \
 && { pip install --quiet --no-index --no-deps --find-links /wheels "$torch" 2>/dev/null \
   || pip install --quiet --no-deps ${TORCH_INDEX:+--extra-index-url "$TORCH_INDEX"} "$torch"; } \
 && pip install --quiet --constraint /constraints.txt "$torch" $EXTRA_PACKAGES \
 && cd /opt/chaosnet/lib/python3*/site-packages/torch && rm -rf test include bin/test_*

# What chaosnet needs, before chaosnet: then a change of its code does not fetch all that again. scikit-learn has the
# digits that the examples train on.
WORKDIR /src
COPY setup.cfg /src/
RUN python -c "import configparser as c; f = c.ConfigParser(); f.read('setup.cfg'); print(f['options']['install_requires'])" \
      > requirements.txt \
 && pip install --quiet --constraint /constraints.txt --requirement requirements.txt scikit-learn

FROM packages AS wheel
COPY . /src/
RUN pip wheel --quiet --no-deps --wheel-dir /wheel /src

FROM ${BASE}
RUN useradd --uid 10001 --create-home node
COPY --from=packages /opt/chaosnet /opt/chaosnet
ENV PATH=/opt/chaosnet/bin:$PATH PYTHONUNBUFFERED=1 CHAOSNET_LISTEN=0.0.0.0:5555
COPY --from=wheel /wheel /wheel
RUN pip install --quiet --no-cache-dir --no-index --no-deps /wheel/*.whl
COPY examples /app/examples
USER node
WORKDIR /app
EXPOSE 5555
# As Ctrl+C: the node finishes its step, tells the others, and leaves.
STOPSIGNAL SIGINT
# Asks the node, and through it the cluster; it imports no torch. Healthy means: the scheduler can be reached from here.
HEALTHCHECK --interval=10s --timeout=8s --start-period=60s --retries=3 CMD ["chaosnet", "status", "127.0.0.1:5555"]
ENTRYPOINT ["chaosnet"]
CMD ["run", "examples/endless.py"]
