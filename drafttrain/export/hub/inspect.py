"""What must not leave the machine: secrets, and paths that mean nothing elsewhere."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

_SECRETS = {
    "a Hugging Face token": re.compile(r"\bhf_[A-Za-z0-9]{20,}"),
    "an API key": re.compile(r"\b(?:sk|rk|pk)-[A-Za-z0-9_-]{20,}"),
    "a GitHub token": re.compile(r"\b(?:ghp|gho|ghs|ghu|github_pat)_[A-Za-z0-9_]{20,}"),
    "an AWS key": re.compile(r"\bAKIA[0-9A-Z]{16}\b"),
    "a Weights & Biases key": re.compile(r"(?i)wandb[\w ]*key[\"']?\s*[:=]\s*[\"']?[0-9a-f]{40}"),
    "a private key": re.compile(r"-----BEGIN [A-Z ]*PRIVATE KEY-----"),
    "a password in an address": re.compile(r"\b[a-z][a-z0-9+.-]*://[^\s/:@\"']+:[^\s/@\"']+@"),
    "a secret": re.compile(
        r"(?i)\b(?:password|passwd|api_?key|secret|access_?token)[\"']?\s*[:=]\s*[\"']?[^\s\"',}]{6,}"
    ),
}
# Of machines, not of repositories and addresses: the first part is one that systems have.
_PATH = re.compile(
    r"(?<![\w:/.~-])(?:(?:/(?:home|root|Users|mnt|media|data|opt|srv|tmp|var|work|workspace|scratch|private|nfs|lustre|gpfs)"
    r"|~|[A-Za-z]:(?=\\))(?:[/\\][\w.@+-]+)+)"
)


def secrets(texts: Mapping[str, str]) -> Iterator[str]:
    """ "file, line: what", without the secret itself.

    Args:
        texts: file name -> content.
    """
    for name, number, line in _lines(texts):
        for what, pattern in _SECRETS.items():
            if pattern.search(line):
                yield f"{name}, line {number}: {what}"


def local_paths(texts: Mapping[str, str]) -> Iterator[str]:
    """ "file, line: path" of paths on some machine."""
    for name, number, line in _lines(texts):
        for found in _PATH.finditer(line):
            yield f"{name}, line {number}: {found.group()}"


def _lines(texts: Mapping[str, str]) -> Iterator[tuple[str, int, str]]:
    for name, text in texts.items():
        for number, line in enumerate(text.splitlines(), 1):
            yield name, number, line
