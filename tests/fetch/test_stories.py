"""TinyStories from a hub on this machine, through the hub's own library: the pinned files, and other revisions."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest

from equipoise.data.corpora import open_corpus
from equipoise.errors import DataError, EquipoiseError
from equipoise.fetch import stories as module
from equipoise.fetch.download import Progress, Unusable
from equipoise.fetch.stories import PINNED, REPOSITORY, REVISION, fetch_stories, names
from equipoise.files import read_json
from equipoise.spec.data import TinyStoriesCorpus

hub_library = pytest.importorskip("huggingface_hub", reason="the extra data is not installed")

COMMIT = "0123456789abcdef0123456789abcdef01234567"
API = f"/api/datasets/{REPOSITORY}"
FILES = {
    "TinyStories-valid.txt": b"Once there was a cat.\n<|endoftext|>\n" * 30,
    "TinyStories-train.txt": b"Once there was a dog.\nIt barked.\n<|endoftext|>\n" * 3000,
}


def answer(value: Any, status: int = 200, error_code: str = "") -> Any:
    body = json.dumps(value).encode()
    facts = {"X-Error-Code": error_code} if error_code else {}

    def send(handler: Any, _: bytes) -> None:
        handler.begin(status, {"Content-Type": "application/json", "Content-Length": str(len(body)), **facts})
        handler.wfile.write(body)

    return send


def stated(content: bytes, name: str, **other: Any) -> dict[str, Any]:
    lfs = {"oid": hashlib.sha256(content).hexdigest(), "size": len(content), "pointerSize": 130}
    return {"type": "file", "path": name, "size": len(content), "oid": "f" * 40, "lfs": lfs, **other}


@pytest.fixture
def hub(site: Any, other_site: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A hub whose branch main is `COMMIT`; its files are on another server, as the hub's are."""
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    site.files[f"{API}/revision/main"] = b""
    site.script[f"{API}/revision/main"] = [answer({"id": REPOSITORY, "sha": COMMIT})] * 9
    site.script[f"{API}/paths-info/{COMMIT}"] = [answer([stated(data, name) for name, data in FILES.items()])] * 9
    for name, data in FILES.items():
        other_site.files[f"/blob/{name}"] = data
        for commit in (COMMIT, REVISION):
            site.script[f"/datasets/{REPOSITORY}/resolve/{commit}/{name}"] = [redirect(other_site, name)] * 9
    site.blobs = other_site
    return site


def redirect(site: Any, name: str) -> Any:
    return lambda handler, _: handler.begin(302, {"Location": f"{site.url}/blob/{name}", "Content-Length": "0"})


def fetch(site: Any, folder: Path, **options: Any) -> tuple[Any, list[str], list[str]]:
    said: list[str] = []
    progress = Progress(report=lambda *_: None, say=said.append, sleep=lambda _: None)
    manifest, fetched = fetch_stories(folder, progress, endpoint=site.url, **options)
    return manifest, fetched, said


def test_pins_are_whole() -> None:
    """The two versions, each a validation and a training file that the corpus reader tells apart by name."""
    assert [name.split("-")[-1] for gpt4 in (False, True) for name in names(gpt4)] == ["valid.txt", "train.txt"] * 2
    assert len(REVISION) == 40 and len({sha256 for _, sha256 in PINNED.values()}) == 4
    assert all(len(sha256) == 64 and int(sha256, 16) for _, sha256 in PINNED.values())


def test_a_branch_becomes_a_commit_and_its_files_arrive(hub: Any, tmp_path: Path) -> None:
    hub.blobs.script["/blob/TinyStories-train.txt"] = [drop(50_000)]
    manifest, fetched, said = fetch(hub, tmp_path, revision="main")
    assert fetched == ["TinyStories-valid.txt", "TinyStories-train.txt"]
    assert manifest == read_json(tmp_path / "manifest.json") and manifest["revision"] == COMMIT
    assert manifest["licence"] == "CDLA-Sharing-1.0"
    for name, data in FILES.items():
        assert (tmp_path / name).read_bytes() == data
        assert manifest["files"][name]["sha256"] == hashlib.sha256(data).hexdigest()
        assert manifest["files"][name]["url"] == f"{hub.url}/datasets/{REPOSITORY}/resolve/{COMMIT}/{name}"
    assert hub.blobs.ranges() == [None, None, "bytes=50000-"]
    assert len(said) == 1 and "trying again in 1.0 s" in said[0]
    source = open_corpus(TinyStoriesCorpus(path=str(tmp_path)))
    assert [file.split for file in source.files] == ["train", "validation"] and not source.notes
    assert sum(1 for _ in source.read()) == 3030


def drop(after: int) -> Any:
    def send(handler: Any, content: bytes) -> None:
        handler.begin(200, {"Content-Length": str(len(content))})
        handler.wfile.write(content[:after])

    return send


def test_a_second_call_fetches_nothing(hub: Any, tmp_path: Path) -> None:
    first, _, _ = fetch(hub, tmp_path, revision="main")
    again, fetched, said = fetch(hub, tmp_path, revision="main")
    assert again == first and not fetched and len(hub.blobs.asked) == 2
    assert said[0] == f"{tmp_path}/TinyStories-valid.txt: already here, its SHA-256 is that of revision 0123456789ab"
    (tmp_path / "manifest.json").unlink()  # files of one's own, if they are the same: taken up
    found, fetched, _ = fetch(hub, tmp_path, revision="main")
    assert not fetched and found["files"].keys() == FILES.keys() and len(hub.blobs.asked) == 2


def test_a_changed_file_is_noticed(hub: Any, tmp_path: Path) -> None:
    fetch(hub, tmp_path, revision="main")
    (tmp_path / "TinyStories-valid.txt").write_bytes(b"x")
    with pytest.raises(DataError) as caught:
        fetch(hub, tmp_path, revision="main")
    assert str(caught.value) == (
        f"{tmp_path}/TinyStories-valid.txt: 1 bytes, recorded {len(FILES['TinyStories-valid.txt'])}; "
        "it was changed since it was fetched: move it away to fetch it again"
    )
    (tmp_path / "manifest.json").unlink()
    with pytest.raises(
        DataError, match=r"TinyStories-valid.txt: is not the file that would be fetched \(SHA-256 \w{64}\)"
    ):
        fetch(hub, tmp_path, revision="main")


def test_the_pinned_files_are_the_only_ones_taken(hub: Any, tmp_path: Path) -> None:
    """Nothing is asked of the hub's interface, and other bytes under the same address are refused."""
    with pytest.raises(Unusable) as caught:
        fetch(hub, tmp_path)
    size = len(FILES["TinyStories-valid.txt"])
    assert str(caught.value).endswith(f"/resolve/{REVISION}/TinyStories-valid.txt: {size:,} bytes; expected 19,447,282")
    assert [path for path, _ in hub.asked] == [f"/datasets/{REPOSITORY}/resolve/{REVISION}/TinyStories-valid.txt"]


def test_what_is_pinned_is_what_is_recorded(hub: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pins = {name: (len(data), hashlib.sha256(data).hexdigest()) for name, data in FILES.items()}
    monkeypatch.setattr(module, "PINNED", pins)
    manifest, fetched, _ = fetch(hub, tmp_path)
    assert len(fetched) == 2 and manifest["revision"] == REVISION
    with monkeypatch.context() as patch:
        patch.setattr(hub_library.constants, "HF_HUB_OFFLINE", True)  # everything is here: nothing to ask for
        assert fetch(hub, tmp_path)[:2] == (manifest, [])
    manifest, fetched, _ = fetch(hub, tmp_path, revision="main")
    assert not fetched and manifest["revision"] == COMMIT == read_json(tmp_path / "manifest.json")["revision"]
    hub.blobs.files["/blob/TinyStories-train.txt"] = FILES["TinyStories-train.txt"].replace(b"dog", b"cow")
    with pytest.raises(
        Unusable, match=r"TinyStories-train.txt: SHA-256 \w{64}; expected \w{64}; what came is thrown away$"
    ):
        fetch(hub, tmp_path / "again")
    assert [path.name for path in (tmp_path / "again").glob("*.txt")] == ["TinyStories-valid.txt"]


def test_a_token_stays_with_the_hub(hub: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    fetch(hub, tmp_path, revision="main")
    asked = [headers for path, headers in hub.asked if "/resolve/" in path]
    assert {headers.get("Authorization") for headers in asked} == {"Bearer hf_secret"}
    assert all(headers["User-Agent"].startswith("equipoise/") and len(headers) == 5 for headers in asked)
    assert not [headers for _, headers in hub.blobs.asked if "Authorization" in headers]


@pytest.mark.parametrize(
    ("path", "reply", "fault"),
    [
        (f"{API}/revision/main", ({"error": "x"}, 404, "RevisionNotFound"), "the data set has no such revision; exp"),
        (f"{API}/revision/main", ({"error": "x"}, 401), "the hub does not answer (HTTP 401)"),
        (f"{API}/revision/main", ({"error": "x"}, 500), "the hub does not answer (HTTP 500)"),
        (f"{API}/revision/main", ({"id": "x", "sha": "../.."},), "the hub names no commit"),
        (f"{API}/revision/main", ({"id": "x"},), "the hub names no commit"),
        (f"{API}/revision/main", ("text",), "the hub does not answer ("),
        (f"{API}/paths-info/{COMMIT}", ([],), "it has no file TinyStories-valid.txt"),
        (f"{API}/paths-info/{COMMIT}", ({},), "it has no file TinyStories-valid.txt"),
        (f"{API}/paths-info/{COMMIT}", ([5],), "the hub does not answer ("),
        (
            f"{API}/paths-info/{COMMIT}",
            ([stated(b"", name, lfs=None) for name in FILES],),
            "the hub states no SHA-256 of TinyStories-valid.txt",
        ),
        (
            f"{API}/paths-info/{COMMIT}",
            ([stated(b"", name, lfs={"oid": "x", "size": 5, "pointerSize": 5}) for name in FILES],),
            "the hub states no SHA-256 of TinyStories-valid.txt",
        ),
    ],
)
def test_a_hub_that_answers_nonsense(hub: Any, tmp_path: Path, path: str, reply: Any, fault: str) -> None:
    hub.script[path] = [answer(*reply)] * 9
    with pytest.raises(DataError) as caught:
        fetch(hub, tmp_path, revision="main")
    text = str(caught.value)
    assert text.startswith(f'{hub.url}: {REPOSITORY} at revision "main": {fault}') and text.isprintable()
    assert not list(tmp_path.iterdir())


def test_a_hub_that_is_not_there(hub: Any, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r'at revision "main": the hub does not answer \('):
        fetch_stories(
            tmp_path,
            Progress(report=lambda *_: None, say=print, sleep=lambda _: None),
            revision="main",
            endpoint="http://127.0.0.1:9",
        )


def test_without_the_library_or_offline(hub: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from huggingface_hub import constants

    with monkeypatch.context() as patch, pytest.raises(EquipoiseError) as caught:
        patch.setattr(constants, "HF_HUB_OFFLINE", True)
        fetch(hub, tmp_path)
    assert str(caught.value) == "tinystories: HF_HUB_OFFLINE is set, so nothing is fetched; unset it to fetch"
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    with pytest.raises(EquipoiseError) as caught:
        fetch(hub, tmp_path)
    assert str(caught.value) == (
        "tinystories: the package huggingface_hub is not installed; python -m pip install 'equipoise[data]'"
    )
    assert not hub.asked
