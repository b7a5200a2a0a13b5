"""The data section of a recipe. Imports no torch."""

from __future__ import annotations

from typing import Any, Literal, Self

from pydantic import Field, model_validator

from drafttrain.config import LEAST_TEMPERATURE, Config, Temperature

Format = Literal["auto", "messages", "sharegpt", "alpaca", "prompt", "text"]
Supervise = Literal["answers", "all"]


class PromptSource(Config):
    """One set of prompts: written by the target itself (`self`), a file or folder, or a `datasets` name."""

    source: str = Field(min_length=1)
    """`self`, a path (.jsonl .json .csv .txt, also with .gz, .parquet, a folder saved by `datasets`), or a dataset
    name."""
    count: int | None = Field(default=None, gt=0)
    """How many prompts to take: a seeded choice, in the source's order; all where unset. `self` needs it."""
    format: Format = "auto"
    split: str = "train"
    subset: str | None = None
    """Configuration name of a `datasets` name."""
    columns: dict[str, str] = Field(default_factory=dict)
    """Usual name (`messages`, `prompt`, `completion`, `instruction`, `text`, ...) -> its name in the file."""
    system: str | None = None
    """A system message put before conversations that have none."""
    seed: int = 0
    temperature: float = Field(default=1.0, ge=LEAST_TEMPERATURE)
    """`self` only: sampling of the user turn."""
    top_p: float = Field(default=0.95, gt=0, le=1)
    max_new_tokens: int = Field(default=96, gt=0)

    @model_validator(mode="after")
    def _complete(self) -> Self:
        if self.source == "self" and self.count is None:
            raise ValueError("source 'self' needs a count: how many prompts the target is to write")
        return self


class AnswersConfig(Config):
    """Who answers the prompts, and how it samples."""

    source: Literal["target", "server", "given"] = "target"
    """`target`: in this process; `server`: any OpenAI-compatible server; `given`: the answers in the data."""
    max_new_tokens: int = Field(default=128, gt=0)
    temperature: Temperature = 0.0
    top_p: float = Field(default=1.0, gt=0, le=1)
    top_k: int = Field(default=0, ge=0)
    """0 is off."""
    repetition_penalty: float = Field(default=1.0, gt=0)
    """Servers only; sent under its own name, as vLLM and SGLang read it."""
    batch_size: int = Field(default=32, gt=0)
    seed: int = 0
    base_url: str | None = None
    """Of the server, up to and including `/v1`."""
    model: str | None = None
    """Model name sent to the server; the first one it lists where unset."""
    api_key_env: str = "OPENAI_API_KEY"
    """Name of the environment variable that holds the key, if the server wants one."""
    concurrency: int = Field(default=16, gt=0)
    retries: int = Field(default=5, ge=0)
    timeout_s: float = Field(default=120.0, gt=0)

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.source == "server" and self.base_url is None:
            raise ValueError("source 'server' needs base_url, such as http://localhost:8000/v1")
        if self.source != "server" and self.repetition_penalty != 1.0:
            raise ValueError("repetition_penalty is only available with source 'server'")
        return self


class DataConfig(Config):
    """Prompts, their answers, and how the conversations become training samples."""

    prompts: list[PromptSource] = Field(default_factory=list)
    answers: AnswersConfig = Field(default_factory=AnswersConfig)
    path: str | None = None
    """Conversations that were answered before (`drafttrain regenerate`), in place of `prompts`."""
    max_length: int = Field(default=1024, gt=1)
    """Tokens; longer conversations are cut there."""
    supervise: Supervise = "answers"
    """`answers`: the tokens that a served draft proposes. `all`: the user's turns and the template, too, for which the
    target has a distribution as well: more to learn from in a small data set."""
    held_out: int = Field(default=32, ge=0)
    """Conversations kept out of training for validation."""
    template_kwargs: dict[str, Any] = Field(default_factory=dict)
    """Extra variables of the chat template, such as `enable_thinking: false`. Templates that ask for the date are told
    26 July 2024, on whatever day they are rendered; where one takes it from a variable (`date_string`), set it here."""

    @model_validator(mode="after")
    def _one_source(self) -> Self:
        if bool(self.prompts) == (self.path is not None):
            raise ValueError("give either prompts or path (conversations answered before)")
        return self

    def within(self, context: int) -> DataConfig:
        """The same, with samples that end where the target's context does."""
        return self.model_copy(update={"max_length": min(self.max_length, context)})

    def cut_note(self, context: int) -> str | None:
        """That `within` changes something, for the user."""
        if self.max_length <= context:
            return None
        return f"samples are cut at {context} tokens, the target's context, not at {self.max_length}"
