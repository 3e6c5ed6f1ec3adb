"""`thimble top`: where a token's time goes, live in the terminal, from what engine and api say at /metrics.

Owns the terminal and the scrapes; what is shown is top_view.py's. Ctrl-C ends it.
"""

import argparse
import contextlib
import http.client
import sys
import time
import urllib.request

from services.tools.amounts import amount
from services.tools.top_view import Scrape, view

HOME_AND_CLEAR = "\033[H\033[J"
TIMEOUT_S = 5.0


class TopError(Exception):
    """The engine's metrics cannot be had. The message is for people."""

    code = "top"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--engine", default="http://127.0.0.1:8601", help="the engine's metrics (default: %(default)s)")
    parser.add_argument("--api", default="http://127.0.0.1:8000", help="the api (default: %(default)s)")
    parser.add_argument("--every", type=amount, default=2.0, help="seconds between two looks (default: %(default)s)")
    parser.add_argument("--once", action="store_true", help="look for that long, print it and end")


def run(args: argparse.Namespace) -> int:
    before = look(args.engine, args.api)
    while True:
        time.sleep(args.every)
        now = look(args.engine, args.api)
        lines = view(before, now)
        if args.once:
            print("\n".join(lines))
            return 0
        if sys.stdout.isatty():
            lines = [HOME_AND_CLEAR + lines[0], *lines[1:]]
        print("\n".join(lines), flush=True)
        before = now


def look(engine: str, api: str) -> Scrape:
    """Raises TopError without an engine; an api that does not answer is left out."""
    try:
        texts = [_metrics(engine)]
    except http.client.BadStatusLine as error:
        raise TopError(f"{engine} answers, but is no web server; give the address of the engine's metrics") from error
    except (OSError, ValueError, http.client.HTTPException) as error:
        raise TopError(f"cannot read {engine}: {error}; is `thimble up` running? Its last lines say where") from error
    if "thimble_decode_steps_total" not in texts[0]:
        raise TopError(f"{engine} has no metrics of an engine; give the engine's address, not the api's")
    at_s = time.monotonic()
    with contextlib.suppress(OSError, ValueError, http.client.HTTPException):
        texts.append(_metrics(api))
    return Scrape.parse(*texts, at_s=at_s)


def _metrics(address: str) -> str:
    root = address if "//" in address else f"http://{address}"
    with urllib.request.urlopen(f"{root.rstrip('/').removesuffix('/metrics')}/metrics", timeout=TIMEOUT_S) as reply:
        return str(reply.read().decode())
