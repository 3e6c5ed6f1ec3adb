"""A TCP server between the api and its store that can be slow, silent or gone, for tests."""

import asyncio
import contextlib
import threading


class SlowProxy:
    """Listens on a free port; `delay_s` is added to every piece of data that the store answers."""

    def __init__(self, socket_path: str, password: str) -> None:
        self.delay_s = 0.0
        self._socket_path = socket_path
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever)
        self._thread.start()
        self._writers: set[asyncio.StreamWriter] = set()
        self._away = asyncio.Event()
        self._server = self._call(self._listen(0))
        self.port = self._server.sockets[0].getsockname()[1]
        self.url = f"redis://:{password}@127.0.0.1:{self.port}"

    def __enter__(self) -> "SlowProxy":
        return self

    def __exit__(self, *error: object) -> None:
        self.go_away()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(5)
        self._loop.close()

    def go_away(self) -> None:
        self._call(self._stop())

    def come_back(self) -> None:
        self._server = self._call(self._listen(self.port))

    def _call(self, work):  # type: ignore[no-untyped-def]
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(10)

    async def _listen(self, port: int) -> asyncio.Server:
        self._away.clear()
        return await asyncio.start_server(self._serve, "127.0.0.1", port)

    async def _stop(self) -> None:
        self._server.close()
        self._away.set()
        for writer in self._writers:
            writer.transport.abort()
        while self._writers:
            await asyncio.sleep(0.001)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        store_reader, store_writer = await asyncio.open_unix_connection(self._socket_path)
        both = {writer, store_writer}
        self._writers |= both

        async def copy(source: asyncio.StreamReader, target: asyncio.StreamWriter, slow: bool) -> None:
            with contextlib.suppress(ConnectionError):
                while data := await source.read(1 << 20):
                    if slow and self.delay_s:
                        with contextlib.suppress(TimeoutError):
                            await asyncio.wait_for(self._away.wait(), self.delay_s)
                    target.write(data)
                    await target.drain()
            for end in both:
                end.transport.abort()

        try:
            await asyncio.gather(copy(reader, store_writer, False), copy(store_reader, writer, True))
        finally:
            self._writers -= both
