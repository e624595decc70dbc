"""The embedded engine: a `transformers` model behind vLLM's token routes, on CPU.

It is a thin front on transformers' continuous batching. What is added is what harnesses need: attention that pays for a
shared prompt once, sampling with a seed per request, weights that change in mid-generation, and the wire.
"""

import os
from typing import Literal


def serve(
    model: str,
    *,
    host: str = "127.0.0.1",
    port: int = 8000,
    max_model_len: int | None = None,
    dtype: Literal["float32", "bfloat16"] = "float32",
    served_model_name: str | None = None,
    max_num_seqs: int = 16,
    kv_cache_gib: float = 2.0,
) -> None:
    """Serve `model` until SIGTERM or SIGINT; prints one line with the URL when ready.

    Where `$POLAR_ENGINE_KEY` is set, every route but `/health` asks for it (`Authorization: Bearer KEY`).

    Args:
        model: `laptop`, `smollm2`, or a Hugging Face model directory.
        port: 0 takes a free one.
        max_model_len: tokens of prompt and reply together; None takes the model's own.
        served_model_name: what `/v1/models` and requests call it; None is `model` as given.
        max_num_seqs: requests that generate at the same time; more wait.
        kv_cache_gib: memory for keys and values; always at least one request of `max_model_len`.

    Raises:
        UsageError: there is no such model, this engine cannot serve it, or the key cannot be sent in a header.
    """
    # Cores are shared with harnesses and trainer; threads that spin for work make everything several times slower.
    # OpenMP reads this when torch is imported, so that import comes after.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")  # the output is a log
    from polar.engines.embedded.models import resolve
    from polar.engines.embedded.server import run
    from polar.engines.keys import key_from_environment

    run(
        resolve(model),
        name=served_model_name or model,
        host=host,
        port=port,
        max_model_len=max_model_len,
        dtype=dtype,
        max_num_seqs=max_num_seqs,
        kv_cache_gib=kv_cache_gib,
        key=key_from_environment(),
    )
