"""Open WebUI as a process of its own, told to stay offline, with an OpenAI connection to the api under test. Owns its
settings and its life. Runs with the Python that Open WebUI is installed for."""

import json
import os
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

START_LIMIT_S = 240

OFFLINE = {
    "OFFLINE_MODE": "true",
    "HF_HUB_OFFLINE": "1",
    "ENABLE_VERSION_UPDATE_CHECK": "false",
    "ANONYMIZED_TELEMETRY": "false",
    "DO_NOT_TRACK": "true",
    # Else it downloads an embedding model and a speech model when it starts.
    "RAG_EMBEDDING_ENGINE": "openai",
    "AUDIO_STT_ENGINE": "openai",
}
# It offers 36 tools of its own with every message, 8,600 tokens of prompt: more than the demo's whole context.
WITHOUT_ITS_TOOLS = {"DEFAULT_MODEL_METADATA": json.dumps({"capabilities": {"builtin_tools": False}})}


class WebUi:
    """`api_url` ends in /v1. `folder` holds its data base and log."""

    def __init__(self, api_url: str, folder: Path) -> None:
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        self.url = f"http://127.0.0.1:{port}"
        self.log = folder / "openwebui.log"
        environ = {
            "DATA_DIR": str(folder),
            "WEBUI_AUTH": "false",
            "WEBUI_SECRET_KEY": "of no use to anybody",
            "ENABLE_OLLAMA_API": "false",
            "OPENAI_API_BASE_URL": api_url,
            "OPENAI_API_KEY": "none",
        }
        with self.log.open("wb") as log:
            self._process = subprocess.Popen(
                [Path(sys.executable).parent / "open-webui", "serve", "--host", "127.0.0.1", "--port", str(port)],
                env=os.environ | environ | OFFLINE | WITHOUT_ITS_TOOLS,
                stdout=log,
                stderr=subprocess.STDOUT,
                cwd=folder,
            )

    def wait_until_ready(self) -> None:
        deadline = time.monotonic() + START_LIMIT_S
        while time.monotonic() < deadline and self._process.poll() is None:
            try:
                with urllib.request.urlopen(f"{self.url}/health", timeout=5):
                    return
            except OSError:
                time.sleep(1)
        raise RuntimeError(f"Open WebUI did not start; the end of its log:\n{self.log.read_text()[-3000:]}")

    def close(self) -> None:
        self._process.terminate()
        try:
            self._process.wait(20)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
