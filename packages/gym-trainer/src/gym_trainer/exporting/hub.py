"""A run's result as a repository of a model hub, through huggingface_hub. Only when a person asks for it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from gym_sdk.cli import console
from gym_sdk.errors import UserError, Where
from gym_trainer.exporting.export import open_finished
from gym_trainer.exporting.folder import size_bytes

_KEY_HINT = "log in with a token that may write there: hf auth login, or set HF_TOKEN"


@dataclass(frozen=True, kw_only=True)
class Pushed:
    """What was sent."""

    url: str
    """Of the commit."""
    folder: Path
    size_bytes: int


def push(path: Path, repository: str, *, public: bool = False, endpoint: str | None = None) -> Pushed:
    """Send a run's adapter or model, with its card, to `owner/name`, which is made where it is not there yet.

    A new repository is private unless `public`; one that is there keeps its visibility. `endpoint` is the hub's
    address; huggingface_hub's own (`HF_ENDPOINT`) when not given.

    Raises:
        UserError: no such run, no result in it, a name that is none, no leave to write there, or no way to the hub.
    """
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalTokenNotFoundError, OfflineModeIsEnabled

    # Of its HTTP library, which differs by version.
    from huggingface_hub.errors import HTTPError as NotReached  # pyright: ignore[reportPrivateImportUsage]

    run, spec = open_finished(path)
    folder = run.adapter_dir if run.adapter_dir.is_dir() else run.model_dir
    if not folder.is_dir():
        raise UserError("this run has no result to push", where=Where(file=str(run.path)), hint=run.state().value)
    size = size_bytes(folder)
    console.err(f"sending {console.format_size(size)} of {folder} to {repository}")
    api = HfApi(endpoint=endpoint)
    try:
        api.create_repo(repository, private=not public, exist_ok=True)
        commit = api.upload_folder(
            repo_id=repository, folder_path=folder, commit_message=f"{spec.method.kind}: {run.name}"
        )
    except HFValidationError as error:
        raise UserError(f"--push {repository} is not a repository's name", hint="write it as owner/name") from error
    except LocalTokenNotFoundError as error:
        raise UserError("the hub wants to know who you are", hint=_KEY_HINT) from error
    except OfflineModeIsEnabled as error:
        raise UserError("HF_HUB_OFFLINE is set: nothing is sent", hint="unset it to push") from error
    except HfHubHTTPError as error:
        code = error.response.status_code
        if code in (401, 403):
            raise UserError(f"the hub does not let you write to {repository} (HTTP {code})", hint=_KEY_HINT) from error
        raise UserError(f"the hub refused {repository} (HTTP {code}): {error.server_message or 'no reason'}") from error
    except NotReached as error:
        raise UserError(
            f"the hub cannot be reached: {error}", hint="check the network; what was sent is kept, so push again"
        ) from error
    return Pushed(url=commit.commit_url, folder=folder, size_bytes=size)
