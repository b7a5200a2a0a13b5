"""The `features` section of a recipe."""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import BeforeValidator, Field, model_validator

from drafttrain.config import Config, Place

StoreDtype = Literal["bfloat16", "float32", "fp8"]
_SHORT = {"bf16": "bfloat16", "fp32": "float32"}


def spell_out(name: Any) -> Any:
    """The element type that a short name stands for; other values as they are."""
    return _SHORT.get(name, name) if isinstance(name, str) else name


class FeaturesConfig(Config):
    """Where the target's states come from while a draft trains.

    Attributes:
        source: "online" runs the target beside the draft; "offline" reads a store, building it first where needed;
            "hybrid" reads what a store has, and computes and adds the rest while training; "stream" asks servers
            that run the target elsewhere (`drafttrain features serve`); "vllm" asks vLLM servers, started as
            `drafttrain features vllm RECIPE` says.
        path: folder of the store; default `features/` inside the run folder.
        dtype: element type on disk: bf16, fp32, or fp8, which is e4m3 with a scale a token and tap.
        record: keep the target's states while it answers (`data.answers.source: target`), so that the store needs no
            forward over the answers. For CPUs: on a GPU such a forward is quick, and answers that are recorded are not,
            for they are written without CUDA graphs. In bf16 these states round otherwise than those of a forward.
        shard_mib: size at which a shard is closed, MiB.
        batch_tokens: tokens (padding included) of one forward of the target.
        verify: "checksum" reads every shard once at start, "size" compares file sizes only.
        workers: threads of a rank that read a store.
        urls: of the servers, such as http://10.0.0.7:8700. With source: offline, servers that compute what the store
            lacks: vLLM servers where there is an exchange, else feature servers.
        exchange: folder that vLLM servers write states to, as this machine sees it; a run reads them and removes them.
            In /dev/shm where all are on one machine.
        concurrency: requests that a rank has under way at each vLLM server; each carries one document.
        token_file: holds the servers' token; None looks in DRAFTTRAIN_FEATURES_TOKEN, then in the cache folder. A vLLM
            server needs none; where it has an API key, it is this.
        on_loss: when no server answers, "stop" the run, or "wait" for one.
        timeout_s: seconds after which a request counts as lost.
    """

    source: Literal["online", "offline", "hybrid", "stream", "vllm"] = "online"
    path: Place | None = None
    dtype: Annotated[StoreDtype, BeforeValidator(spell_out)] = "bfloat16"
    record: bool = False
    shard_mib: int = Field(default=256, ge=1)
    batch_tokens: int = Field(default=4096, ge=1)
    verify: Literal["checksum", "size"] = "checksum"
    workers: int = Field(default=1, ge=1)
    urls: tuple[str, ...] = ()
    exchange: str | None = None
    concurrency: int = Field(default=16, ge=1)
    token_file: str | None = None
    on_loss: Literal["stop", "wait"] = "stop"
    timeout_s: float = Field(default=300.0, gt=0)

    @model_validator(mode="after")
    def _keys_fit_the_source(self) -> Self:
        if not self.stores and self.path is not None:
            raise ValueError("path names a store, which only source: offline and hybrid read")
        if self.served and not self.urls:
            raise ValueError(f"source: {self.source} needs urls, those of its servers")
        if self.urls and not self.served and self.source != "offline":
            raise ValueError(f"urls are of servers, which source: {self.source} does not ask")
        if self.source == "vllm" and self.exchange is None:
            raise ValueError("source: vllm needs exchange, the folder that its servers write states to")
        if self.exchange is not None and (self.source == "stream" or not self.urls):
            raise ValueError("exchange is a folder of vLLM servers, which nothing here asks: see source and urls")
        if self.exchange is not None and not self.exchange.startswith("/"):
            raise ValueError(f"exchange {self.exchange!r} must be an absolute path")
        strange = [url for url in self.urls if not url.startswith(("http://", "https://"))]
        if strange:
            raise ValueError(f"{strange[0]!r} is no url of a server, such as http://10.0.0.7:8700")
        return self

    @property
    def stores(self) -> bool:
        """Whether there is a store."""
        return self.source in ("offline", "hybrid")

    @property
    def served(self) -> bool:
        """Whether servers are asked while training."""
        return self.source in ("stream", "vllm")
