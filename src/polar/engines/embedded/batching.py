"""Sets up transformers' continuous batching for this engine: its attention, scheduler, sampler and way out.

Everything that relies on the insides of transformers is here, in `scheduling` and in `sampling`.
"""

import time
from collections.abc import Callable
from typing import Any

from transformers import ContinuousBatchingConfig, GenerationConfig
from transformers.generation.continuous_batching.continuous_api import BackgroundThreadStatus, OutputRouter
from transformers.generation.continuous_batching.requests import GenerationOutput

from polar.engines.embedded import attention, scheduling
from polar.engines.embedded.sampling import Sampler

PAGE = 32  # tokens; what two prompts share is counted in pages
BATCH_TOKENS = 256  # of a prefill step: about a second on a slow core, during which nothing else goes on

Deliver = Callable[[list[GenerationOutput]], object]


class _Router(OutputRouter):
    """Hands on the outputs of a step together, from the generating thread."""

    def __init__(self, deliver: Deliver) -> None:
        self._deliver = deliver

    def deliver(self, output: GenerationOutput) -> None:
        self._deliver([output])

    def deliver_batch(self, outputs: list[GenerationOutput]) -> None:
        self._deliver(outputs)


def make_manager(
    model: Any, sampler: Sampler, deliver: Deliver, *, max_model_len: int, max_num_seqs: int, kv_cache_gib: float
) -> Any:
    """A `ContinuousBatchingManager` for `model`, not yet started.

    Args:
        deliver: called in the generating thread with the outputs of each step.
        kv_cache_gib: see `polar.engines.embedded.serve`.
    """
    blocks = _blocks(model, max_model_len, max_num_seqs, kv_cache_gib)
    config: Any = ContinuousBatchingConfig(
        page_size=PAGE,
        num_blocks=blocks,
        max_batch_tokens=BATCH_TOKENS,
        max_requests_per_batch=max_num_seqs,
        use_async_batching=False,
        scheduler_type=scheduling.NAME,
        safety_margin=0.1,  # of the cache, which new prompts leave for running ones to grow
    )
    greedy: Any = GenerationConfig
    manager = model.init_continuous_batching(greedy(do_sample=False, eos_token_id=-1), config)
    manager.logit_processor = sampler.as_list()
    manager.output_router = _Router(deliver)
    # The manager lets in only implementations that it knows, and offers decoding by block table only to flash attention
    # on a GPU. Ours is one that it does not know, and does the same on CPU.
    model.set_attn_implementation(attention.NAME)
    manager.continuous_batching_config.max_blocks_per_request = blocks
    manager.warmup()  # takes the memory now, where a lack of it is an error of the caller and not of a thread
    return manager


def flush(manager: Any) -> None:
    """Inside `manager.pause()`: forget all keys and values. Running requests are computed again, so that no sequence mixes
    two sets of weights, and no page of old ones is ever found under a prefix."""
    manager.batch_processor.scheduler.restart_all()
    manager.batch_processor.cache.reset()


def stop(manager: Any) -> None:
    """End generation after the step that runs. (`manager.stop` would also collect garbage, which takes seconds.)"""
    manager.background_thread_status.request_stop(BackgroundThreadStatus.HARD_STOP, 0)
    manager.join(time.perf_counter())


def counters(manager: Any) -> dict[str, int]:
    """Requests and prefix cache, by vLLM's names."""
    scheduler = manager.batch_processor.scheduler
    return {
        "num_requests_running": len(scheduler.active_requests),
        "num_requests_waiting": len(scheduler.waiting_requests),
        "prefix_cache_queries_total": scheduler.prefix_queries,
        "prefix_cache_hits_total": scheduler.prefix_hits,
    }


def _blocks(model: Any, max_model_len: int, max_num_seqs: int, gib: float) -> int:
    """Pages of cache: what fits into `gib`, at least one request of `max_model_len` and at most `max_num_seqs` of them."""
    config = model.config.get_text_config()
    head_dim: int = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    page_bytes: int = 2 * config.num_hidden_layers * config.num_key_value_heads * head_dim * model.dtype.itemsize * PAGE
    per_request = -(-max_model_len // PAGE) + 1
    return max(per_request, min(int(gib * 2**30) // page_bytes, per_request * max_num_seqs))
