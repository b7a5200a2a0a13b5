from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from drafttrain.features.config import FeaturesConfig


def test_element_types_have_short_names() -> None:
    for short, name in (("bf16", "bfloat16"), ("fp32", "float32"), ("fp8", "fp8"), ("bfloat16", "bfloat16")):
        assert FeaturesConfig.model_validate_json(f'{{"dtype": "{short}"}}', strict=True).dtype == name


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"path": "x"}, "path names a store"),
        ({"source": "stream"}, "stream needs urls"),
        ({"source": "hybrid", "urls": ("http://a:1",)}, "source: hybrid does not ask"),
        ({"source": "online", "urls": ("http://a:1",)}, "source: online does not ask"),
        ({"source": "vllm", "exchange": "/dev/shm/x"}, "vllm needs urls"),
        ({"source": "vllm", "urls": ("http://a:1",)}, "vllm needs exchange"),
        ({"source": "vllm", "urls": ("http://a:1",), "exchange": "states"}, "'states' must be an absolute path"),
        ({"source": "vllm", "urls": ("http://a:1",), "exchange": "/x", "path": "y"}, "path names a store"),
        ({"source": "vllm", "urls": ("http://a:1",), "exchange": "/x", "concurrency": 0}, "concurrency"),
        ({"source": "stream", "urls": ("http://a:1",), "exchange": "/x"}, "which nothing here asks"),
        ({"source": "offline", "exchange": "/x"}, "which nothing here asks"),
        ({"source": "stream", "urls": ("10.0.0.7:8700",)}, "'10.0.0.7:8700' is no url"),
        ({"source": "stream", "urls": ("http://a:1",), "path": "x"}, "path names a store"),
        ({"dtype": "fp16"}, "dtype"),
        ({"workers": 0}, "workers"),
    ],
)
def test_keys_that_do_not_fit_the_source_are_refused(values: dict[str, Any], said: str) -> None:
    with pytest.raises(ValidationError, match=said):
        FeaturesConfig(**values)
