# Stands in for prom/prometheus: Debian's package with the official image's entry point, user and folder.
FROM thimble-stand-in/python:3.11
RUN apt-get update && apt-get install -y --no-install-recommends prometheus && rm -rf /var/lib/apt/lists/* \
    && install --directory --owner 65534 --group 65534 /prometheus
WORKDIR /prometheus
ENTRYPOINT ["/usr/bin/prometheus"]
