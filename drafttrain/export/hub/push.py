"""Send an export to a hub repository. The token comes from the environment alone."""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from drafttrain.errors import UserError
from drafttrain.export.doctor.case import Case, engine_for
from drafttrain.export.doctor.draft import CONFIG, open_draft
from drafttrain.export.doctor.finding import Severity
from drafttrain.export.doctor.registry import lint
from drafttrain.export.hub.errors import explained
from drafttrain.export.hub.inspect import local_paths, secrets
from drafttrain.export.sidecar import SIDECAR, read_sidecar
from drafttrain.files import read_json, sha256_file
from drafttrain.recipe.schema import RESOLVED
from drafttrain.targets import embedded

TOKEN, ENDPOINT = "HF_TOKEN", "HF_ENDPOINT"
CARD = "README.md"
_TEXT = (".md", ".json", ".yaml", ".yml", ".txt", ".jinja")
_SENT = (*_TEXT, ".safetensors", ".model", ".gguf")
_HUB_NAME = re.compile(r"^[A-Za-z0-9][\w.-]*/[\w.-]+$")
# What serves a draft: vLLM's command, SGLang's, TensorRT-LLM's with its options, and the script for transformers.
_SERVED_FROM = (
    re.compile(r'(--speculative-config \S*\{[^}]*"model": ")[^"]+'),
    re.compile(r"(--speculative-draft-model-path )\S+"),
    re.compile(r"(--extra_llm_api_options )\S+(?=/llm_api_options\.yaml)"),
    re.compile(r"(^ *speculative_model: )\S+", re.MULTILINE),
    re.compile(r"(\bdraft = AutoModelForCausalLM\.from_pretrained\(')[^']+"),
)
_NOT_LINTED = "gguf"
_SHOWN = 12


@dataclass(frozen=True)
class SentFile:
    """One file as it will arrive.

    Attributes:
        name: in the repository.
        source: on disk.
        text: its content where it is changed on the way, else None.
        size: in bytes.
        sha256: of what arrives.
    """

    name: str
    source: Path
    text: str | None
    size: int
    sha256: str


@dataclass(frozen=True)
class Plan:
    """What a push sends.

    Attributes:
        repo: the repository.
        private: whether it is made private, if it does not exist.
        files: in order of name.
        left_out: files of the folder that are not sent.
        warnings: of the doctor, and what was forced.
    """

    repo: str
    private: bool
    files: list[SentFile]
    left_out: list[str]
    warnings: list[str] = field(default_factory=list)

    @property
    def size(self) -> int:
        """Bytes in all."""
        return sum(file.size for file in self.files)


def plan_push(
    export: str | Path, repo: str, *, private: bool = False, base_model: str | None = None, force: bool = False
) -> Plan:
    """What would be sent; nothing is.

    In text files the export's own path becomes the repository's name, and the target's path `base_model`.

    Args:
        export: a folder that `drafttrain export` wrote.
        repo: "owner/name".
        private: of a repository that is made.
        base_model: the target's name on the hub.
        force: send in spite of the doctor's errors and of paths of this machine. Secrets are never sent.

    Raises:
        UserError: no export of ours, a name that is none, or whatever must not be sent; all of it at once.
    """
    folder = Path(export)
    _check_name(repo)
    if base_model is not None and not _HUB_NAME.match(base_model):
        raise UserError("is no name on a hub", where="--base-model", remedy="give OWNER/NAME of the target")
    about = read_sidecar(folder) if folder.is_dir() else None
    if about is None:
        raise UserError(
            f"holds no {SIDECAR}: not an export of this version of drafttrain",
            where=folder,
            remedy="give the folder that `drafttrain export RUN --to ...` wrote",
        )
    paths = sorted(path for path in folder.rglob("*") if path.is_file())
    names = {path: path.relative_to(folder).as_posix() for path in paths}
    sent = [path for path in paths if path.suffix in _SENT and not _hidden(names[path])]
    before = {names[path]: path.read_text(encoding="utf-8") for path in sent if path.suffix in _TEXT}
    texts = {name: _for_others(text, folder, repo, about, base_model) for name, text in before.items()}
    if CARD in texts:
        texts[CARD] = front_matter(about, base_model) + texts[CARD]
    problems, warnings = _examine(folder, about, texts, force)
    (warnings if force else problems).extend(_contradictions(about, base_model))
    if problems:
        raise UserError(
            "; ".join(problems[:_SHOWN]) + (f"; and {len(problems) - _SHOWN} more" if len(problems) > _SHOWN else ""),
            where=folder,
            remedy="mend the draft with `drafttrain doctor`, name its own target with --base-model, or take the lines "
            "out; --force sends in spite of all but secrets",
        )
    files = [_file(path, names[path], before, texts) for path in sent]
    return Plan(repo, private, files, [names[path] for path in paths if path not in sent], warnings)


def _check_name(repo: str) -> None:
    if not _HUB_NAME.match(repo) or ".." in repo or "--" in repo or repo.endswith((".", "-", ".git")):
        raise UserError("is no name of a repository", where=repo, remedy="give OWNER/NAME")


def _contradictions(about: Mapping[str, Any], base_model: str | None) -> list[str]:
    """What speaks against the name under which the target is to be published.

    A target from a hub has its name; of one from a folder the sizes must be those of the model that is named, as far as
    that one is at hand.
    """
    target = about.get("target") or {}
    own = str(target.get("name") or "")
    if base_model is None:
        return []
    known = embedded.HUB_NAME if own == embedded.NAME else own
    if _HUB_NAME.match(known) and not Path(known).exists():
        differs = base_model.lower() != known.lower()
        return [f"--base-model {base_model}: the export was made for {known}"] if differs else []
    return [
        f"--base-model {base_model}: the export was made for {own}, {size}" for size in _other_sizes(target, base_model)
    ]


def _other_sizes(target: Mapping[str, Any], base_model: str) -> list[str]:
    """Sizes in which a model differs from a target, as far as its config lies in the hub's cache."""
    from huggingface_hub import try_to_load_from_cache

    path = try_to_load_from_cache(base_model, CONFIG)
    if not isinstance(path, str):
        return []
    config = read_json(path)
    text = config.get("text_config") or config
    keys = (("hidden_size", "hidden_size"), ("n_layers", "num_hidden_layers"), ("vocab_size", "vocab_size"))
    return [
        f"whose {theirs} is {target[ours]}, not {text[theirs]}"
        for ours, theirs in keys
        if target.get(ours) and text.get(theirs) and target[ours] != text[theirs]
    ]


def _hidden(name: str) -> bool:
    return any(part.startswith(".") for part in name.split("/"))


def _for_others(text: str, folder: Path, repo: str, about: Mapping[str, Any], base_model: str | None) -> str:
    """Paths of this machine under the names that others know."""
    # The command in the card names the folder where the export was written, perhaps not where it lies now.
    for pattern in _SERVED_FROM:
        text = pattern.sub(lambda found: found[1] + repo, text)
    places = {str(folder.resolve()): repo, str(folder.absolute()): repo, str(folder): repo}
    run = folder.resolve().parent.parent
    if (run / RESOLVED).is_file():
        places |= {str(run): f"runs/{run.name}"}
    # A program's own name is a path of its environment, however it was called.
    program = next(iter((about.get("provenance") or {}).get("command") or []), "")
    if Path(program).is_absolute():
        places |= {program: Path(program).name}
    if base_model is not None:
        target = str((about.get("target") or {}).get("name") or "")
        places |= {str(embedded.converted_folder()): base_model}
        if target:
            places |= {target: base_model}
    for place, name in sorted(places.items(), key=lambda item: -len(item[0])):
        # Longest first: one may be the beginning of another.
        if place not in (".", "/"):
            text = re.sub(rf"(?<![\w/.-]){re.escape(place)}/?(?![\w/.-])", name, text)
    return text


def front_matter(about: Mapping[str, Any], base_model: str | None) -> str:
    """The head of the card, which hubs index."""
    lines = ["---", "library_name: drafttrain"]
    target = base_model or str((about.get("target") or {}).get("name") or "")
    if _HUB_NAME.match(target):
        lines.append(f"base_model: {target}")
    tags = ["speculative-decoding", str(about["family"]).replace("_", "-"), str(about["engine"])]
    lines += ["tags:", *(f"- {tag}" for tag in tags), "---", "", ""]
    return "\n".join(lines)


def _examine(
    folder: Path, about: Mapping[str, Any], texts: Mapping[str, str], force: bool
) -> tuple[list[str], list[str]]:
    """What must not be sent, and what is only worth a warning."""
    found = []
    if about["engine"] != _NOT_LINTED:
        draft = open_draft(folder)
        # What is sent says where it lies there.
        found = lint(Case(draft, None, engine_for(draft, about), about), ignored=("options-place",))
    errors = [f"{one.rule}: {one.what}" for one in found if one.severity is Severity.error]
    paths = list(dict.fromkeys(local_paths(texts)))
    warnings = [f"{one.rule}: {one.what}" for one in found if one.severity is not Severity.error]
    kept = [*errors, *paths]
    hidden = list(dict.fromkeys(secrets(texts)))
    return (hidden, [*warnings, *kept]) if force else ([*hidden, *kept], warnings)


def _file(path: Path, name: str, before: Mapping[str, str], texts: Mapping[str, str]) -> SentFile:
    text = texts.get(name)
    if text is None or text == before[name]:
        return SentFile(name, path, None, path.stat().st_size, sha256_file(path))
    data = text.encode()
    return SentFile(name, path, text, len(data), hashlib.sha256(data).hexdigest())


def push(plan: Plan) -> str:
    """Send it in one commit. Returns the address of the repository.

    Raises:
        UserError: no token, no leave, no network.
    """
    token = os.environ.get(TOKEN)
    if not token:
        raise UserError(
            "there is no token",
            where=TOKEN,
            remedy=f"set {TOKEN} in the environment to one that may write to {plan.repo}; none is read from elsewhere",
        )
    with explained(plan.repo):
        from huggingface_hub import CommitOperationAdd, HfApi

        api = HfApi(endpoint=os.environ.get(ENDPOINT), token=token, library_name="drafttrain")
        address = str(api.create_repo(plan.repo, private=plan.private or None, exist_ok=True, repo_type="model"))
        operations = [
            CommitOperationAdd(file.name, file.source if file.text is None else file.text.encode())
            for file in plan.files
        ]
        api.create_commit(plan.repo, operations, commit_message=f"Draft with {CONFIG} and card, by drafttrain push")
    return address
