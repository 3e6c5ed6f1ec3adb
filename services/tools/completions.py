"""One chat completion of a running server, as the examinations ask for it. Owns the request and its failures.

The server is any with OpenAI's API. Its key, if it wants one, is OPENAI_API_KEY, as for `thimble chat`.
"""

import http.client
import json
import os
import urllib.error
import urllib.request
from collections.abc import Mapping
from typing import Any


class ServerError(Exception):
    """The server cannot be reached, or has not answered. The message says what to do."""

    code = "server"


def first_choice(url: str, body: Mapping[str, Any], timeout_s: float) -> Any:
    """The first of the answer's choices. `url` has /v1 at its end. Raises ServerError."""
    address = f"{url.rstrip('/')}/chat/completions"
    headers = {"Content-Type": "application/json"}
    if key := os.environ.get("OPENAI_API_KEY", ""):
        headers["Authorization"] = f"Bearer {key}"
    if not address.startswith(("http://", "https://")):
        raise ServerError(f"{url!r} is no address of a server; give one like http://127.0.0.1:8000/v1")
    try:
        request = urllib.request.Request(address, json.dumps(body).encode(), headers)
        with urllib.request.urlopen(request, timeout=timeout_s) as reply:
            return json.load(reply)["choices"][0]
    except urllib.error.HTTPError as error:
        with error:
            to_do = "" if url.rstrip("/").endswith("/v1") else "; give its address with /v1 at its end"
            raise ServerError(f"{address}: {_said(error)}{to_do}") from error
    except http.client.BadStatusLine as error:
        raise ServerError(f"{url}: answers, but is no web server; give the api's address") from error
    except (OSError, http.client.HTTPException) as error:
        why = getattr(error, "reason", error)
        raise ServerError(f"{url}: cannot be asked: {why}; is `thimble up` running?") from error
    except (ValueError, LookupError, TypeError) as error:
        raise ServerError(f"{url}: is no OpenAI-compatible server; give its address with /v1 at its end") from error


def _said(error: urllib.error.HTTPError) -> str:
    """What the server says is wrong, else what a status alone can mean."""
    try:
        return f"{json.loads(error.read())['error']['message']} (status {error.code})"
    except (OSError, ValueError, LookupError, TypeError):
        return f"the server answered with status {error.code}"
