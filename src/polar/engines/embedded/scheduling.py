"""What runs next: shared prompts are prefilled once, and prefill never stops the others from going on."""

from collections.abc import Sequence
from itertools import takewhile
from operator import eq
from typing import Any

from transformers.generation.continuous_batching.requests import FutureRequestState, RequestState, RequestStatus
from transformers.generation.continuous_batching.scheduler import SCHEDULER_MAPPING, Scheduler

NAME = "polar_prefix"


class PrefixScheduler(Scheduler):
    """Prefill and decode in turns, each in batches of their own: in a mixed one every decoding request would have to copy
    its cache (see `attention`).

    Attributes:
        prefix_queries, prefix_hits: prompt tokens looked up in the prefix cache, and found there.
    """

    prefix_queries = 0
    prefix_hits = 0
    _prefilled_last = False

    def schedule_batch(self, token_budget: int, cache_budget: int) -> tuple[list[FutureRequestState] | None, bool, int, int]:
        """As `Scheduler` says: requests of the next batch, whether all decode, tokens to compute, cache to read."""
        if not self.active_requests:
            self.block_new_requests = False  # set while requests were swapped out, and left so if the rest are cancelled
        decoding = [state for state in self.active_requests.values() if state.status == RequestStatus.DECODING]
        prefilling = [state for state in self.active_requests.values() if state.status == RequestStatus.PREFILLING]
        if not self.block_new_requests and len(self.active_requests) < self.max_requests_per_batch:
            prefilling += self._admissible(prefilling)
        turns = [decoding, prefilling] if self._prefilled_last else [prefilling, decoding]
        admitted: set[str] = set()
        for turn in filter(None, turns):  # the second, if the cache has no room for any of the first
            batch, starved, all_decode, tokens, reads = self._process_candidates(turn, token_budget, cache_budget, admitted)
            if batch:
                break
        else:
            turn, batch, starved, all_decode, tokens, reads = [], [], bool(decoding or prefilling), False, 0, 0
        self._prefilled_last = turn is prefilling
        self._cleanup_waiting_queue(admitted)
        return (None if starved and not batch else batch), all_decode, tokens, reads

    def _admissible(self, prefilling: list[RequestState]) -> list[RequestState]:
        """Waiting requests up to the limit, without those whose prompt starts with pages that are being computed right
        now for another: a moment later these can be shared."""
        (allocator,) = self.cache.cache_allocators.values()
        room = self.max_requests_per_batch - len(self.active_requests)
        leaders = [state.initial_tokens for state in prefilling]
        admissible: list[RequestState] = []
        for state in self._get_waiting_candidates():
            if len(admissible) == room:
                break
            ids = state.initial_tokens
            ready = len(allocator.match_prefix_blocks(ids))
            if any(_common(ids, leader) // allocator.tokens_per_page > ready for leader in leaders):
                continue
            leaders.append(ids)
            admissible.append(state)
        return admissible

    def _infer_request_tokens(self, state: RequestState, request_ids_to_remove_from_waiting: set[str]) -> list[int]:
        before = state.position_offset
        tokens: list[int] = super()._infer_request_tokens(state, request_ids_to_remove_from_waiting)
        if state.position_offset > before:
            self.prefix_queries += len(state.initial_tokens)
            self.prefix_hits += state.position_offset - before
        return tokens

    def _schedule_request(
        self, state: RequestState, request_tokens: list[int], token_budget: int, request_ids_to_remove_from_waiting: set[str]
    ) -> None:
        if state.status == RequestStatus.PENDING:  # no longer so if a prefix was found
            self.prefix_queries += len(state.initial_tokens)
        super()._schedule_request(state, request_tokens, token_budget, request_ids_to_remove_from_waiting)

    def finish_request(self, request_id: str) -> None:
        """Free its slot. Pages that its last step completed are kept for others too, which the base class forgets."""
        state = self.active_requests.get(request_id)
        if state is not None and state.status == RequestStatus.FINISHED:
            computed = (state.initial_tokens + state.generated_tokens)[: state.position_offset]
            for allocator in self.cache.cache_allocators.values():
                if request_id in allocator.block_table:  # no longer so where it was swapped out
                    allocator.mark_complete_blocks(request_id, computed, len(computed))
        super().finish_request(request_id)

    def restart_all(self) -> None:
        """Have every active request computed again from its first token, sampled ones kept; running ones come first."""
        running = list(self.active_requests.values())
        waiting = list(self.waiting_requests.values())
        for state in running:
            self.finish_request(state.request_id)
        self.waiting_requests.clear()
        self.waiting_requests_order.clear()
        for state in running:
            self.add_waiting_request(state.create_equivalent_initial_request())
        for state in waiting:
            self.add_waiting_request(state)
        self.block_new_requests = False


def _common(a: Sequence[int], b: Sequence[int]) -> int:
    return sum(1 for _ in takewhile(bool, map(eq, a, b)))


schedulers: dict[str, Any] = SCHEDULER_MAPPING
schedulers[NAME] = PrefixScheduler
