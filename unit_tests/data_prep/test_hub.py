"""Reading from the hub, through the real libraries: against a server on this machine that answers as the hub does, and
without any network."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from pyarrow import parquet

from data_prep.__main__ import main
from unit_tests.data_prep import hub_copies

ROOT = Path(__file__).parents[2]
COMMIT = "0123456789abcdef0123456789abcdef01234567"


class Hub(ThreadingHTTPServer):
    """Data sets `owner/name` from folders, at one commit each, with the few answers that a download asks for."""

    def __init__(self, repositories: dict[str, Path]) -> None:
        super().__init__(("127.0.0.1", 0), Answers)
        self.repositories = repositories
        self.asked: list[str] = []
        self.address = f"http://127.0.0.1:{self.server_address[1]}"


class Answers(BaseHTTPRequestHandler):
    server: Hub

    def do_GET(self) -> None:
        self._answer(body=True)

    def do_HEAD(self) -> None:
        self._answer(body=False)

    def do_POST(self) -> None:
        """Which of these paths are there: POST /api/datasets/{owner}/{name}/paths-info/{revision}."""
        asked = self.rfile.read(int(self.headers["Content-Length"])).decode()
        folder = self._folder(self.path.split("/")[3:5])
        named = json.loads(asked)["paths"] if asked.startswith("{") else []
        found = [
            {"type": "file", "path": n, "size": (folder / n).stat().st_size, "oid": "0" * 40}
            for n in named
            if folder and (folder / n).is_file()
        ]
        self._send(json.dumps(found).encode(), True)

    def _answer(self, body: bool) -> None:
        self.server.asked.append(self.path)
        parts = self.path.split("?")[0].strip("/").split("/")
        folder = self._folder(parts[2:4] if parts[0] == "api" else parts[1:3])
        if folder is None:
            return self._refuse("RepoNotFound")
        if parts[0] == "api":
            if len(parts) > 5 and parts[5] not in ("main", COMMIT):
                return self._refuse("RevisionNotFound")
            files = [p.relative_to(folder).as_posix() for p in sorted(folder.rglob("*")) if p.is_file()]
            info = {"id": "/".join(parts[2:4]), "sha": COMMIT, "siblings": [{"rfilename": name} for name in files]}
            return self._send(json.dumps(info).encode(), body)
        path = folder / "/".join(parts[5:])
        return self._send(path.read_bytes(), body) if path.is_file() else self._refuse("EntryNotFound")

    def _folder(self, name: list[str]) -> Path | None:
        return self.server.repositories.get("/".join(name))

    def _send(self, content: bytes, body: bool) -> None:
        self.send_response(200)
        self.send_header("Content-Length", str(len(content)))
        self.send_header("ETag", f'"{hashlib.sha1(content).hexdigest()}"')
        self.send_header("X-Repo-Commit", COMMIT)
        self.end_headers()
        if body:
            self.wfile.write(content)

    def _refuse(self, code: str) -> None:
        self.send_response(404)
        self.send_header("X-Error-Code", code)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[Hub]:
    served = {
        "openai/gsm8k": hub_copies.gsm8k(tmp_path / "gsm8k"),
        "THU-KEG/MM_Math": hub_copies.mm_math(tmp_path / "mm"),
    }
    server = Hub(served)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


def command(tmp_path: Path, *arguments: object, endpoint: str | None, **more: str) -> subprocess.CompletedProcess[str]:
    """The command in a process of its own, with a cache of its own: hub settings are read when the library loads."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("HF_", "HUGGING"))}
    environment |= {"HF_HOME": str(tmp_path / "cache"), "HF_HUB_DISABLE_XET": "1", **more}
    if endpoint:
        environment["HF_ENDPOINT"] = endpoint
    called = [sys.executable, "-m", "data_prep", *map(str, arguments)]
    return subprocess.run(called, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=120)


def test_files_are_fetched_at_one_commit_and_read_as_local_ones(hub: Hub, tmp_path: Path) -> None:
    """With MM-Math, whose images lie in a zip file beside the rows."""
    done = command(tmp_path, "mm_math", "--from-hub", "--out", tmp_path / "out", endpoint=hub.address)
    assert done.returncode == 0, done.stderr
    assert main(["mm_math", "--source", str(tmp_path / "mm"), "--out", str(tmp_path / "local")]) == 0
    fetched = parquet.read_table(tmp_path / "out/train.parquet")
    assert fetched.equals(parquet.read_table(tmp_path / "local/train.parquet"))
    assert fetched["images"].to_pylist() == [[hub_copies.PNG], [hub_copies.JPEG]]
    source = json.loads((tmp_path / "out/card.json").read_text())["sources"][0]
    assert (source["commit"], source["repository"], source["revision"]) == (COMMIT, "THU-KEG/MM_Math", "main")
    assert any(f"/resolve/{COMMIT}/MM_Math/MM_Math.zip" in path for path in hub.asked)


def test_a_refusal_names_the_repository(hub: Hub, tmp_path: Path) -> None:
    for more, named in ((["--repository", "a/b"], "a/b at main"), (["--revision", "v9"], "THU-KEG/MM_Math at v9")):
        gone = command(tmp_path, "mm_math", "--from-hub", *more, "--out", tmp_path / "x", endpoint=hub.address)
        assert gone.returncode == 2 and gone.stderr.count("\n") == 1
        assert gone.stderr.startswith(f"error: the hub's {named} could not be read; ")


@pytest.mark.parametrize(
    ("endpoint", "setting"),
    [(None, {"HF_HUB_OFFLINE": "1"}), ("http://127.0.0.1:9", {})],
    ids=["offline", "unreachable"],
)
def test_without_network_one_line_and_the_way_out(
    endpoint: str | None, setting: dict[str, str], tmp_path: Path
) -> None:
    started = time.monotonic()
    done = command(tmp_path, "hh_rlhf", "--from-hub", "--out", tmp_path / "out", endpoint=endpoint, **setting)
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1
    assert done.stderr.startswith("error: the hub's Anthropic/hh-rlhf at main could not be read; ")
    assert "--source FOLDER" in done.stderr
    assert time.monotonic() - started < 60  # seconds on a free machine, most of them for loading the library
    assert not (tmp_path / "out").exists()
