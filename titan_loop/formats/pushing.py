"""Upload of an exported folder or file to the Hugging Face Hub."""

from pathlib import Path

from titan_loop.errors import UserError, first_line


def push_folder(folder: Path, repo: str) -> str:
    """Upload to a model repository, created private if it is new; return the commit's address."""
    try:
        from huggingface_hub import HfApi

        api = HfApi()
        api.create_repo(repo, private=True, exist_ok=True)
        if folder.is_file():
            name = folder.name
            return str(api.upload_file(repo_id=repo, path_or_fileobj=folder, path_in_repo=name))
        return str(api.upload_folder(repo_id=repo, folder_path=folder))
    except Exception as error:  # the client raises many kinds
        raise UserError(
            f"--push {repo}: not pushed ({first_line(error)}); the export is whole in {folder}: "
            f"check the network and hf auth login, then run hf upload {repo} {folder}"
        ) from error
