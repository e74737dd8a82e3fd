"""TinyStories from the Hugging Face hub: the two official text files of a revision, checked against the hub's SHA-256.

The library of the hub (extra `data`) knows where the files are, the user's token and, for a revision other than the
pinned one, what they are; the bytes are fetched by `download`, because the library forgets what a broken download had
brought. Not for: other data sets of the hub.
"""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from equipoise import __version__
from equipoise.errors import DataError
from equipoise.faults import reason, show
from equipoise.fetch.download import Progress, Remote, download, part_of
from equipoise.fetch.manifest import VERSION, Manifest, entry, is_here, keep, read_manifest, record
from equipoise.fetch.web import shown

if TYPE_CHECKING:
    from huggingface_hub import HfApi

REPOSITORY: Final = "roneneldan/TinyStories"
REVISION: Final = "f54c09fd23315a6f9c86f9dc80f725de7d8f9c64"
"""Head of the data set's main branch since August 2024."""
LICENCE: Final = "CDLA-Sharing-1.0"
MAX_BYTES: Final = 1 << 34
"""16 GiB, eight times the larger of the files."""

PINNED: Final[dict[str, tuple[int, str]]] = {
    "TinyStories-valid.txt": (19_447_282, "94e431816c4cce81ff71e4408ff8d3bda9a42e8d2663986697c3954288cb38b4"),
    "TinyStories-train.txt": (1_924_281_556, "c5cf5e22ff13614e830afbe61a99fbcbe8bcb7dd72252b989fa1117a368d401f"),
    "TinyStoriesV2-GPT4-valid.txt": (22_502_601, "6874bae9a4c1a4e7edcf0e53b86c17817e9cf881fc75ff2368da457b80c0585d"),
    "TinyStoriesV2-GPT4-train.txt": (2_227_753_162, "6418d412de72888f52b5142c761ac21a582f7d1166f0bfbdb5f03ccfdec90443"),
}
"""Bytes and SHA-256 of the text files at `REVISION`, as the hub's Git LFS states them; several public projects that
fetched them record the same."""


def names(gpt4: bool) -> list[str]:
    """The two files: of the first version, or of the second, which GPT-4 alone wrote. The small one first."""
    return [name for name in PINNED if ("GPT4" in name) == gpt4]


def fetch_stories(
    folder: Path, progress: Progress, *, gpt4: bool = False, revision: str = REVISION, endpoint: str | None = None
) -> tuple[Manifest, list[str]]:
    """Fetch what is missing of the two files into `folder`; returns its manifest and the names that were fetched.

    `revision` is a commit, branch or tag; the manifest has the commit. `endpoint` is another hub than the library's
    (which `HF_ENDPOINT` names). Raises DataError, ResourceError.
    """
    api = _library(endpoint)
    commit, files = (REVISION, PINNED) if revision == REVISION else _ask_hub(api, revision, names(gpt4))
    fresh: Manifest = {
        "schema_version": VERSION,
        "corpus": "tinystories-gpt4" if gpt4 else "tinystories",
        "source": f"hub data set {REPOSITORY}",
        "revision": commit,
        "licence": LICENCE,
        "files": {},
    }
    manifest: Manifest = {**read_manifest(folder, fresh), "revision": commit}
    fetched = []
    for name in names(gpt4):
        num_bytes, sha256 = files[name]
        url, headers = _address(api, name, commit)
        if is_here(folder, manifest, name, sha256):
            progress.say(f"{folder / name}: already here, its SHA-256 is that of revision {commit[:12]}")
            if name not in manifest["files"]:
                manifest = record(folder, manifest, {name: entry(url, folder / name, sha256)})
            continue
        _refuse_offline()
        remote = Remote(url=url, name=name, max_bytes=MAX_BYTES, num_bytes=num_bytes, sha256=sha256, headers=headers)
        download(remote, folder, progress)
        manifest = keep(folder, manifest, name, entry(url, part_of(folder, name), sha256))
        fetched.append(name)
    return record(folder, manifest, {}), fetched  # the revision may be another one, with the same files


def _library(endpoint: str | None) -> HfApi:
    """The hub's client; DataError when the extra is not installed."""
    if importlib.util.find_spec("huggingface_hub") is None:
        raise DataError(
            "tinystories: the package huggingface_hub is not installed; python -m pip install 'equipoise[data]'"
        )
    from huggingface_hub import HfApi

    return HfApi(endpoint=endpoint, library_name="equipoise", library_version=__version__)


def _address(api: HfApi, name: str, commit: str) -> tuple[str, dict[str, str]]:
    """Where a file is, and the headers to ask for it: the user's token of the hub, if there is one, nothing else."""
    from huggingface_hub import constants, get_token, hf_hub_url

    url = hf_hub_url(REPOSITORY, name, repo_type="dataset", revision=commit, endpoint=api.endpoint)
    token = None if constants.HF_HUB_DISABLE_IMPLICIT_TOKEN else get_token()
    return url, {"Authorization": f"Bearer {token}"} if token else {}


def _refuse_offline() -> None:
    """DataError when the hub's library was told to stay offline: that is meant for whoever uses it, too."""
    from huggingface_hub import constants

    if constants.HF_HUB_OFFLINE:
        raise DataError("tinystories: HF_HUB_OFFLINE is set, so nothing is fetched; unset it to fetch")


def _ask_hub(api: HfApi, revision: str, wanted: list[str]) -> tuple[str, dict[str, tuple[int, str]]]:
    """The commit that `revision` is now, and bytes and SHA-256 of its files as the hub states them."""
    where = f"{shown(api.endpoint)}: {REPOSITORY} at revision {show(revision)}"
    commit = str(_asked(lambda: api.dataset_info(REPOSITORY, revision=revision).sha, where))
    if not re.fullmatch(r"[0-9a-f]{40}", commit):
        raise DataError(f"{where}: the hub names no commit")
    found: list[Any] = _asked(
        lambda: api.get_paths_info(REPOSITORY, wanted, revision=commit, repo_type="dataset"), where
    )
    files: dict[str, tuple[int, str]] = {}
    for name in wanted:
        facts = next((one for one in found if one.path == name), None)
        if facts is None:
            raise DataError(f"{where}: it has no file {name}")
        lfs = getattr(facts, "lfs", None)
        if lfs is None or not re.fullmatch(r"[0-9a-f]{64}", str(lfs.sha256)) or not isinstance(lfs.size, int):
            raise DataError(f"{where}: the hub states no SHA-256 of {name}")
        files[name] = (lfs.size, lfs.sha256)
    return commit, files


def _asked(question: Callable[[], Any], where: str) -> Any:
    """What the library answers; whatever it raises, of itself or of the client below it, in one line."""
    from huggingface_hub.errors import RevisionNotFoundError

    try:
        return question()
    except RevisionNotFoundError:
        raise DataError(f"{where}: the data set has no such revision; expected a commit, branch or tag") from None
    except Exception as error:
        status = getattr(getattr(error, "response", None), "status_code", None)
        why = f"HTTP {status}" if status else reason(error)
        raise DataError(f"{where}: the hub does not answer ({why})") from None
