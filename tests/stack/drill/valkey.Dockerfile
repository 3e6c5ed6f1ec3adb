# Stands in for valkey/valkey: Debian's redis-server under Valkey's names.
FROM thimble-stand-in/python:3.11
RUN apt-get update && apt-get install -y --no-install-recommends redis-server && rm -rf /var/lib/apt/lists/* \
    && ln -s redis-server /usr/bin/valkey-server && ln -s redis-cli /usr/bin/valkey-cli
WORKDIR /tmp
