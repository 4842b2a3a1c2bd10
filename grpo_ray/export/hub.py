"""Upload of an exported folder to a model repository on the Hugging Face hub.

All files are uploaded in one commit, so the repository has either the old model or the new one, never a mixture. An
interrupted upload is repeated with the same command: large files that have arrived are not sent again. The token is
read only from the environment variable `HF_TOKEN` and sent only to the hub, or to the server in `HF_ENDPOINT`.
"""

import os
import re
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from tenacity import Retrying, retry_if_exception, stop_after_attempt, wait_exponential

from grpo_ray.errors import ConfigError, HubError

if TYPE_CHECKING:
    from huggingface_hub import HfApi

T = TypeVar("T")

TOKEN = "HF_TOKEN"
"""Environment variable with the user's token."""
WEIGHTS = re.compile(r"(?:[^/]+\.safetensors|(?:pytorch_|adapter_)?model[^/]*\.bin)(?:\.index\.json)?")
"""Names of weight files in a repository. Those of an earlier upload are deleted: a loader may prefer them. Other `.bin`
files, such as `training_args.bin`, have no weights."""
ATTEMPTS = 4
LONGEST_PAUSE_SECONDS = 8.0
TRANSIENT_STATUS = frozenset({408, 429, 500, 502, 503, 504})


def token_from_environment() -> str:
    """Return the token. Raises ConfigError if there is none."""
    token = os.environ.get(TOKEN, "").strip()
    if not token:
        raise ConfigError(
            f"--push needs a token with write access to the hub in the environment variable {TOKEN}; it is not set"
        )
    return token


@dataclass(frozen=True)
class HubRepo:
    """Existing model repository on the hub that the upload may write to."""

    name: str
    """`owner/name`."""
    is_private: bool
    is_new: bool
    """True if `open_repo` created it."""
    files: frozenset[str]
    """Paths of the files in the repository."""

    @property
    def visibility(self) -> str:
        return "private" if self.is_private else "public"


@dataclass(frozen=True)
class Hub:
    """Connection to the hub."""

    token: str = field(repr=False)
    on_progress: Callable[[str], None] = print
    """Called with a description of each phase."""
    endpoint: str | None = None
    """Address of the hub; None: that of `HF_ENDPOINT`, or the public hub."""
    first_pause_seconds: float = 1.0
    """Pause before the second attempt; each further one is twice as long."""

    def open_repo(self, name: str, public: bool) -> HubRepo:
        """Find a repository, or create it. Call this before a long export, so that a push that cannot work fails early.

        Args:
            name: `owner/name`, or a name alone: the owner is then the user of the token.
            public: create it publicly visible; an existing repository keeps its visibility.

        Raises:
            ConfigError: the name or the token is refused, or the repository is public and `public` is False.
            HubError: the hub is unreachable, or a request failed for another reason.
        """
        from huggingface_hub.errors import HFValidationError
        from huggingface_hub.utils import validate_repo_id

        try:
            validate_repo_id(name)
        except HFValidationError as error:
            raise ConfigError(f"--push {name}: {error}") from None
        return self._call(name, lambda api: self._open_repo(api, name, public))

    def _open_repo(self, api: "HfApi", name: str, public: bool) -> HubRepo:
        from huggingface_hub.errors import RepositoryNotFoundError

        user = api.whoami()["name"]
        name = name if "/" in name else f"{user}/{name}"
        try:
            info = api.model_info(name)
        except RepositoryNotFoundError:
            api.create_repo(name, private=not public)
            self.on_progress(f"created the {'public' if public else 'private'} repository {name}")
            return HubRepo(name, is_private=not public, is_new=True, files=frozenset())
        repo = HubRepo(name, bool(info.private), False, frozenset(file.rfilename for file in info.siblings or ()))
        if not repo.is_private and not public:
            raise ConfigError(f"{name} exists and is public; add --public to push to it, or name another repository")
        self.on_progress(f"{name} exists and stays {repo.visibility}; the upload is a new commit on its main branch")
        return repo

    def upload(self, folder: Path, repo: HubRepo, message: str) -> str:
        """Upload all files of a folder in one commit, and return the address of the repository.

        Weights of an earlier upload that the folder does not have are deleted in the same commit.

        Raises:
            ConfigError: the token may not write to the repository.
            HubError: the hub is unreachable, or a request failed for another reason. Large files that have arrived are
                not sent again by the next upload.
        """
        files = {path.relative_to(folder).as_posix(): path for path in sorted(_files_of(folder))}
        stale = sorted(name for name in repo.files - files.keys() if WEIGHTS.fullmatch(name))
        if stale:
            self.on_progress(f"replacing {', '.join(stale)}")
        size = sum(path.stat().st_size for path in files.values())
        self.on_progress(f"uploading {len(files)} files, {size / 1e6:.1f} MB, to the {repo.visibility} {repo.name}")

        def commit(api: "HfApi") -> str:
            from huggingface_hub import CommitOperationAdd, CommitOperationDelete
            from huggingface_hub.utils import disable_progress_bars

            if not sys.stderr.isatty():
                disable_progress_bars()
            operations: list[CommitOperationAdd | CommitOperationDelete] = [
                *(CommitOperationDelete(name) for name in stale),
                *(CommitOperationAdd(name, path) for name, path in files.items()),
            ]
            api.create_commit(repo.name, operations, commit_message=message)
            return f"{api.endpoint}/{repo.name}"

        return self._call(repo.name, commit)

    def _call(self, repo: str, action: Callable[["HfApi"], T]) -> T:
        """Run an action that is safe to repeat, and repeat it after transient errors.

        Raises:
            ConfigError, HubError: the last error, described in one line.
        """
        import httpx
        from huggingface_hub import HfApi

        retrying = Retrying(
            retry=retry_if_exception(_is_transient),
            wait=wait_exponential(multiplier=self.first_pause_seconds, max=LONGEST_PAUSE_SECONDS),
            stop=stop_after_attempt(ATTEMPTS),
            reraise=True,
        )
        try:
            return retrying(action, HfApi(endpoint=self.endpoint, token=self.token, library_name="grpo_ray"))
        except ConfigError:
            raise
        except (
            httpx.HTTPError,
            httpx.InvalidURL,
            OSError,
            RuntimeError,
            ValueError,
        ) as error:  # errors of huggingface_hub and hf_xet
            raise _describe(error, repo) from error


def _files_of(folder: Path) -> Iterator[Path]:
    """Yield the files of a folder, without hidden ones."""
    for path in folder.rglob("*"):
        if path.is_file() and not any(part.startswith(".") for part in path.relative_to(folder).parts):
            yield path


def _causes(error: BaseException) -> Iterator[BaseException]:
    """Yield an error and its causes, since huggingface_hub wraps some errors."""
    seen: BaseException | None = error
    while seen is not None:
        yield seen
        seen = seen.__cause__


def _status(error: BaseException) -> int | None:
    """Return the HTTP status of an error; None if there was no response."""
    for each in _causes(error):
        if (response := getattr(each, "response", None)) is not None:
            return int(response.status_code)
    return None


def _is_transient(error: BaseException) -> bool:
    """Return True if the hub was unreachable or overloaded, so that the same call may succeed later."""
    import httpx
    from huggingface_hub.errors import OfflineModeIsEnabled

    if (status := _status(error)) is not None:
        return status in TRANSIENT_STATUS
    return any(
        isinstance(each, httpx.TransportError | ConnectionError | TimeoutError)
        and not isinstance(each, OfflineModeIsEnabled | httpx.UnsupportedProtocol)
        for each in _causes(error)
    )


def _describe(error: Exception, repo: str) -> ConfigError | HubError:
    """Describe an error in one line, with the remedy."""
    status = _status(error)
    root = list(_causes(error))[-1] if status is None else error
    text = " ".join((getattr(root, "server_message", None) or str(root) or type(root).__name__).split())[:300]
    if status == 401:
        return ConfigError(f"the hub refused the token in {TOKEN} (401); set a valid one with write access")
    if status == 403:
        return ConfigError(
            f"the token in {TOKEN} may not write to {repo} (403): {text}; name a repository that it may write to"
        )
    if not _is_transient(error):
        return HubError(f"the push to {repo} failed: {text}")
    return HubError(
        f"the push to {repo} failed: {f'status {status}' if status else text}; run the same command again: large files "
        "that have arrived are not sent again"
    )
