"""A real Prometheus that scrapes every three seconds, and what it answers."""

import json
import shutil
import subprocess
import time
import urllib.parse
import urllib.request
from contextlib import contextmanager, suppress
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

from ray_head import free_port

READY_S = 60.0
CONFIG = "global: {scrape_interval: 3s, scrape_timeout: 3s}\nscrape_configs:\n"
JOB = "  - {job_name: NAME, static_configs: [{targets: ['TARGET']}]}\n"


def can_start() -> bool:
    return all(map(shutil.which, ("prometheus", "promtool")))


class PrometheusServer:
    """Prometheus over some targets."""

    def __init__(self, folder: Path, targets: dict[str, str]):
        self.url = f"http://127.0.0.1:{free_port()}"
        config = folder / "prometheus.yml"
        jobs = (JOB.replace("NAME", name).replace("TARGET", target) for name, target in targets.items())
        config.write_text(CONFIG + "".join(jobs))
        options = (f"--config.file={config}", f"--storage.tsdb.path={folder / 'data'}")
        command = ["prometheus", *options, f"--web.listen-address={self.url.removeprefix('http://')}"]
        self._log = (folder / "prometheus.log").open("wb")
        self._process = subprocess.Popen(command, stdout=self._log, stderr=self._log)
        deadline_s = time.monotonic() + READY_S
        while True:
            with suppress(OSError), urllib.request.urlopen(f"{self.url}/-/ready", timeout=5):
                return
            assert self._process.poll() is None and time.monotonic() < deadline_s, Path(self._log.name).read_text()
            time.sleep(0.1)

    def query(self, expression: str) -> list[tuple[dict[str, str], float]]:
        """Labels and values of an instant query."""
        asked = urllib.parse.urlencode({"query": expression})
        with urllib.request.urlopen(f"{self.url}/api/v1/query?{asked}", timeout=20) as answer:
            found = json.loads(answer.read())["data"]
        assert found["resultType"] == "vector", expression
        return [(each["metric"], float(each["value"][1])) for each in found["result"]]

    def stop(self) -> None:
        self._process.terminate()
        self._process.wait(30)
        self._log.close()


@contextmanager
def serving_folder(folder: Path):
    """Serve the files of a folder, as node_exporter does its text files; gives HOST:PORT."""

    class Handler(SimpleHTTPRequestHandler):
        def __init__(self, *args):
            super().__init__(*args, directory=str(folder))

        def log_message(self, *_):
            """Print nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    try:
        yield f"127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
