"""Asks a service whether it is ready: `thimble health`, the containers' health checks, and `thimble up`'s waiting.

Owns no retry: one question, one answer, within a bound.
"""

import argparse
import http.client
import json
import sys
import urllib.error
import urllib.request

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from services.tools.complaints import UsageError

TIMEOUT_S = 3.0


def engine_trouble(address: str, timeout_s: float = TIMEOUT_S) -> str:
    """Empty if the engine's gRPC health service says SERVING, else what it says instead."""
    with grpc.insecure_channel(address) as channel:
        try:
            reply = health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=timeout_s)
        except grpc.RpcError as error:
            return f"{address}: {error.code().name.lower().replace('_', ' ')}"
    if reply.status == health_pb2.HealthCheckResponse.SERVING:
        return ""
    return f"{address}: {health_pb2.HealthCheckResponse.ServingStatus.Name(reply.status).lower().replace('_', ' ')}"


def api_trouble(url: str, timeout_s: float = TIMEOUT_S) -> str:
    """Empty if GET `url` (the api's /ready or /health) answers 200, else what it answers instead."""
    try:
        with urllib.request.urlopen(url, timeout=timeout_s) as reply:
            return "" if reply.status == 200 else f"{url}: status {reply.status}"
    except urllib.error.HTTPError as error:
        with error:
            return f"{url}: {_message(error.read()) or f'status {error.code}'}"
    except http.client.BadStatusLine:
        return f"{url}: answers, but is no web server"
    except (OSError, http.client.HTTPException) as error:
        return f"{url}: {getattr(error, 'reason', error)}"
    except ValueError:
        return f"{url}: is no address; give one like http://127.0.0.1:8000/ready"


def _message(body: bytes) -> str:
    try:
        return str(json.loads(body)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return ""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--engine", metavar="HOST:PORT", help="ask this engine's gRPC health service")
    parser.add_argument("--api", metavar="URL", help="ask this URL, an api's /ready or /health")


def run(args: argparse.Namespace) -> int:
    if not args.engine and not args.api:
        raise UsageError("name an engine with --engine HOST:PORT or an api with --api URL, or both")
    troubles = [engine_trouble(args.engine)] if args.engine else []
    troubles += [api_trouble(args.api)] if args.api else []
    for trouble in troubles:
        print(trouble or "ready", file=sys.stderr if trouble else sys.stdout)
    return int(any(troubles))
