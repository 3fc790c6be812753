"""The computing half of the local engine: sessions in rows, prefill, one decode step for all, new weights.

Running sessions lie in rows 0..n-1, so that a decode step reads the cache in place; sessions being filled and parked
ones lie behind them. The last token of a session is never in the cache: the decode step feeds it. So a prompt, a later
turn and a rebuild after new weights are all the same work, filling the cache up to the token before the last.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import PreTrainedModel

from sao.engines.cache import ATTENTION, RowCache, cache_argument
from sao.engines.protocol import EngineError, Sampling
from sao.engines.sampling import draw, keyed_uniforms
from sao.models.load import named_weights, output_head
from sao.types import GenerationStop, TokenChunk

LENGTH, CACHED, EMITTED, LIMIT, CEILING, SEED, OFFSET, KNOWN = range(8)
"""Columns of a row's integers: tokens held, of these in the cache, of these given out; lengths at which max_tokens and
the context end it; seed; token index minus length; tokens that were once in the cache (to count rebuilt ones)."""

_SMALL_FILL = 256
"""Tokens, padding included, up to which a forward costs a small model about the same."""

_LARGE_FILL = 2048
"""The same for several pieces, above which a processor's cache no longer holds a small model's activations: 16,000
tokens took 1.5 times as long in one forward as in ten."""

_PATIENCE = 0.5
"""A small fill costs about as much as this share of a decode step: sessions wait for company until the steps they
waited, summed, are this share of the running rows, so that waiting never costs more than the forwards it saves."""


@dataclass(eq=False, slots=True)
class Generation:
    """One request for tokens."""

    session: str
    """Whose cache it goes on with; one generation at a time."""
    token_ids: NDArray[np.int64]
    """Prompt (T,), checked against the vocabulary."""
    max_tokens: int
    """Most tokens to sample after the prompt."""
    sampling: Sampling
    """Distribution and seed of the draws."""
    deliver: Callable[[TokenChunk | EngineError], None]
    """Takes each chunk, or the error that ends the stream."""
    cancelled: bool = False
    """An end was asked for, and comes between two steps."""
    ended: bool = False
    """Its last chunk, or an error, has been delivered."""


@dataclass(eq=False, slots=True)
class _Seat:
    """A session that holds a row."""

    name: str
    row: int
    last_used: int = 0
    generation: Generation | None = None


@dataclass(frozen=True, slots=True)
class _Fill:
    seat: _Seat
    start: int
    end: int


@dataclass(slots=True)
class Plan:
    """What the next step will compute."""

    fills: list[_Fill] = field(default_factory=list)
    """Pieces of prompts to put into the cache before the decode step, oldest session first."""
    decoded: int = 0
    """Rows of the decode step."""

    @property
    def prefilled(self) -> int:
        """Tokens put into the cache before it."""
        return sum(fill.end - fill.start for fill in self.fills)


Delivery = tuple[Generation, TokenChunk]


class Decoder:
    """Not thread-safe; every method leaves rows, cache and counters consistent, or raises for good."""

    def __init__(self, model: PreTrainedModel, *, version: int, rows: int, max_context: int, flush_tokens: int) -> None:
        model.set_attn_implementation(ATTENTION)
        self.model = model.eval().requires_grad_(False)
        self._device, self._dtype = model.device, model.dtype
        self.version = version
        self.max_context = max_context
        self._head = output_head(model)
        self.vocab_size = int(model.config.get_text_config().vocab_size)
        self.generated_tokens = 0
        self.recomputed_tokens = 0
        self._backbone = model.base_model
        self._cache_argument = cache_argument(self._backbone)
        # One more row than sessions: the probe runs there.
        self._cache = RowCache(model, rows=rows + 1, columns=max_context)
        self._probe_row = rows
        self._flush_tokens = flush_tokens
        self._columns = torch.arange(max_context, device=model.device)
        self._seats: list[_Seat | None] = [None] * rows
        self._by_name: dict[str, _Seat] = {}
        self._evicted: dict[str, int] = {}
        self._running = 0
        self._filling: list[_Seat] = []
        self._waited = 0
        self._tick = 0
        self._tokens = np.zeros((rows, max_context + 1), dtype=np.int64)
        self._logprobs = np.zeros((rows, max_context + 1), dtype=np.float32)
        self._numbers = np.zeros((rows, 8), dtype=np.int64)
        self._options = np.ones((rows, 2), dtype=np.float64)
        self._stops = np.full((rows, 1), -1, dtype=np.int64)

    def admit(self, generation: Generation) -> bool:
        """Give the generation a row, its session's own if it still has one; False if none can be had now."""
        seat = self._by_name.get(generation.session) or self._take_row(generation.session)
        if seat is None:
            return False
        assert seat.generation is None, "a session has one generation at a time"
        tokens, row = generation.token_ids, seat.row
        length = len(tokens)
        numbers = self._numbers[row]
        shared = min(length, int(numbers[LENGTH]))
        differing = np.flatnonzero(self._tokens[row, :shared] != tokens[:shared])
        prefix = int(differing[0]) if len(differing) else shared
        numbers[CACHED] = min(int(numbers[CACHED]), prefix, length - 1)
        numbers[KNOWN] = min(int(numbers[KNOWN]), self._evicted.pop(seat.name, prefix))
        numbers[LENGTH] = numbers[EMITTED] = length
        numbers[LIMIT] = length + generation.max_tokens
        numbers[CEILING] = self.max_context
        numbers[SEED] = np.uint64(generation.sampling.seed & 0xFFFFFFFFFFFFFFFF).view(np.int64)
        numbers[OFFSET] = generation.sampling.first_token_index - length
        self._tokens[row, :length] = tokens
        self._options[row] = (generation.sampling.temperature, generation.sampling.top_p)
        self._set_stops(row, generation.sampling.stop_token_ids)
        seat.generation = generation
        self._filling.append(seat)
        return True

    def plan(self, prefill_tokens: int) -> Plan:
        """Fill the oldest admitted sessions first, up to the budget; decode all that are ready then.

        Small fills wait for company while other sessions decode.
        """
        plan = Plan()
        ready = self._running
        numbers = self._numbers[[seat.row for seat in self._filling]]
        missing = int((numbers[:, LENGTH] - 1 - numbers[:, CACHED]).sum())
        if self._waited + len(self._filling) <= _PATIENCE * self._running and missing < _SMALL_FILL:
            prefill_tokens = 0
        for seat in self._filling:
            start, needed = int(self._numbers[seat.row, CACHED]), int(self._numbers[seat.row, LENGTH]) - 1
            end = min(needed, start + prefill_tokens)
            if end > start:
                plan.fills.append(_Fill(seat, start, end))
                prefill_tokens -= end - start
            if end == needed:
                ready += 1
        plan.decoded = ready
        return plan

    @torch.inference_mode()
    def step(self, plan: Plan) -> list[Delivery]:
        """Carry out a plan; returns what is to be given out, in row order."""
        for group in _similar(plan.fills):
            self._fill(group)
        self._waited = 0 if plan.fills else self._waited + len(self._filling)
        for seat in [seat for seat in self._filling if self._complete(seat)][: plan.decoded - self._running]:
            self._filling.remove(seat)
            self._exchange(seat.row, self._running)
            self._running += 1
        if not self._running:
            return []
        self._decode()
        return self._collect()

    def cancel(self, generation: Generation) -> list[Delivery]:
        """End a generation that holds a row, giving out what it has; nothing if it holds none."""
        seat = self._by_name.get(generation.session)
        if seat is None or seat.generation is not generation:
            return []
        return [self._finish(seat, GenerationStop.CANCELLED)]

    def close(self, session: str) -> None:
        """Forget a session that has no generation."""
        self._evicted.pop(session, None)
        seat = self._by_name.get(session)
        if seat is not None and seat.generation is None:
            self._free(seat)

    def flush(self) -> list[Delivery]:
        """Give out every sampled token that is still held back."""
        held = self._numbers[:, LENGTH] > self._numbers[:, EMITTED]
        return [self._chunk(seat, None) for seat in self._seats if seat and seat.generation and held[seat.row]]

    def replace_weights(self, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Take weights by name without touching the cache; returns the former ones."""
        former = dict(named_weights(self.model))
        assert former.keys() == weights.keys(), "weights were read for this model"
        parameters = dict(self.model.named_parameters())
        for name, weight in weights.items():
            if name in parameters:
                parameters[name].data = weight.to(former[name].device)
            else:
                former[name] = former[name].clone()
                self.model.get_buffer(name).copy_(weight)
        return former

    def invalidate(self) -> None:
        """Mark the cache of every session as of other weights: it is rebuilt before the session's next token."""
        self._numbers[:, CACHED] = 0
        self._filling = [seat for seat in self._seats[: self._running] if seat is not None] + self._filling
        self._running = 0

    @torch.inference_mode()
    def score(self, token_ids: Sequence[int]) -> NDArray[np.float32]:
        """Log-probs (T-1,) of tokens after the first, by the same cached path that sampling uses."""
        tokens = torch.tensor([token_ids], device=self._device)
        positions = torch.arange(len(token_ids))[None]
        hidden = self._forward(tokens, positions, slice(self._probe_row, self._probe_row + 1), len(token_ids))
        logprobs = torch.log_softmax(self._head(hidden[0, :-1]).float(), dim=1)
        return logprobs.gather(1, tokens[0, 1:, None])[:, 0].cpu().numpy()

    def _forward(self, tokens: Tensor, positions: Tensor, rows: slice | Tensor, longest: int) -> Tensor:
        """Hidden states (n, q, H) of tokens (n, q) at positions (n, q), each seeing its row up to itself."""
        self._cache.place(rows, positions, longest)
        positions = positions.clamp(max=self.max_context - 1).to(self._device)
        hidden = self._columns[:longest] > positions[:, None, :, None]
        mask = torch.zeros(hidden.shape, dtype=self._dtype, device=self._device)
        mask.masked_fill_(hidden, -torch.inf)
        arguments = {self._cache_argument: self._cache}
        return self._backbone(
            input_ids=tokens, attention_mask=mask, position_ids=positions, use_cache=True, **arguments
        ).last_hidden_state

    def _fill(self, group: Sequence[_Fill]) -> None:
        """Compute keys and values of several sessions' pieces, padded to the longest."""
        widest = max(fill.end - fill.start for fill in group)
        tokens = np.zeros((len(group), widest), dtype=np.int64)
        # Padding goes past the last column, where the cache drops it.
        positions = np.full((len(group), widest), self.max_context, dtype=np.int64)
        rows = np.array([fill.seat.row for fill in group])
        for line, fill in enumerate(group):
            size = fill.end - fill.start
            tokens[line, :size] = self._tokens[fill.seat.row, fill.start : fill.end]
            positions[line, :size] = np.arange(fill.start, fill.end)
        longest = max(fill.end for fill in group)
        where = slice(rows[0], rows[0] + 1) if len(rows) == 1 else torch.from_numpy(rows)
        self._forward(torch.from_numpy(tokens).to(self._device), torch.from_numpy(positions), where, longest)
        for fill in group:
            numbers = self._numbers[fill.seat.row]
            numbers[CACHED] = fill.end
            self.recomputed_tokens += max(0, min(fill.end, int(numbers[KNOWN])) - fill.start)
            numbers[KNOWN] = max(numbers[KNOWN], fill.end)

    def _decode(self) -> None:
        """Sample one token for every running row."""
        count = self._running
        numbers = self._numbers[:count]
        lines = np.arange(count)
        lengths = numbers[:, LENGTH].copy()
        tokens = torch.from_numpy(self._tokens[lines, lengths - 1][:, None]).to(self._device)
        positions = torch.from_numpy((lengths - 1)[:, None])
        hidden = self._forward(tokens, positions, slice(0, count), int(lengths.max()))
        uniforms = keyed_uniforms(numbers[:, SEED].copy(), lengths + numbers[:, OFFSET])
        ids, logprobs = draw(
            self._head(hidden[:, 0]), uniforms, self._options[:count, 0].copy(), self._options[:count, 1].copy()
        )
        if not np.isfinite(logprobs).all():
            raise EngineError(f"policy version {self.version} gives logits that are not finite; the weights are broken")
        self._tokens[lines, lengths] = ids
        self._logprobs[lines, lengths] = logprobs
        numbers[:, CACHED] = lengths
        np.maximum(numbers[:, KNOWN], lengths, out=numbers[:, KNOWN])
        numbers[:, LENGTH] = lengths + 1
        self.generated_tokens += count

    def _collect(self) -> list[Delivery]:
        """Chunks of the rows that ended or have enough tokens; ended sessions are parked."""
        numbers = self._numbers[: self._running]
        lengths = numbers[:, LENGTH]
        newest = self._tokens[np.arange(self._running), lengths - 1]
        stopped = (newest[:, None] == self._stops[: self._running]).any(axis=1)
        ended = stopped | (lengths >= numbers[:, LIMIT]) | (lengths >= numbers[:, CEILING])
        due = np.flatnonzero(ended | (lengths - numbers[:, EMITTED] >= self._flush_tokens))
        deliveries: list[Delivery] = []
        finished: list[tuple[_Seat, GenerationStop]] = []
        for row in due.tolist():
            seat = self._seats[row]
            assert seat is not None
            if not ended[row]:
                deliveries.append(self._chunk(seat, None))
            elif stopped[row]:
                finished.append((seat, GenerationStop.STOP_TOKEN))
            elif lengths[row] >= numbers[row, LIMIT]:
                finished.append((seat, GenerationStop.MAX_TOKENS))
            else:
                finished.append((seat, GenerationStop.CONTEXT_FULL))
        return deliveries + [self._finish(seat, stop) for seat, stop in finished]

    def _chunk(self, seat: _Seat, stop: GenerationStop | None) -> Delivery:
        numbers = self._numbers[seat.row]
        emitted, length = int(numbers[EMITTED]), int(numbers[LENGTH])
        numbers[EMITTED] = length
        assert seat.generation is not None
        return seat.generation, TokenChunk(
            token_ids=tuple(self._tokens[seat.row, emitted:length].tolist()),
            logprobs=tuple(self._logprobs[seat.row, emitted:length].tolist()),
            version=self.version,
            stop=stop,
        )

    def _finish(self, seat: _Seat, stop: GenerationStop) -> Delivery:
        """Give out the rest and park the session behind the running rows."""
        delivery = self._chunk(seat, stop)
        delivery[0].ended = True
        seat.generation = None
        self._tick += 1
        seat.last_used = self._tick
        if seat.row < self._running:
            self._running -= 1
            self._exchange(seat.row, self._running)
        else:
            self._filling.remove(seat)
        return delivery

    def _complete(self, seat: _Seat) -> bool:
        return bool(self._numbers[seat.row, CACHED] == self._numbers[seat.row, LENGTH] - 1)

    def _take_row(self, session: str) -> _Seat | None:
        """A free row, or that of the session parked longest."""
        if None not in self._seats:
            parked = [seat for seat in self._seats if seat is not None and seat.generation is None]
            if not parked:
                return None
            oldest = min(parked, key=lambda seat: seat.last_used)
            self._evicted[oldest.name] = int(self._numbers[oldest.row, KNOWN])
            self._free(oldest)
        row = self._seats.index(None)
        seat = self._seats[row] = self._by_name[session] = _Seat(session, row)
        self._numbers[row] = 0
        self._numbers[row, KNOWN] = self._evicted.get(session, 0)
        return seat

    def _free(self, seat: _Seat) -> None:
        self._seats[seat.row] = None
        del self._by_name[seat.name]
        self._numbers[seat.row] = 0

    def _set_stops(self, row: int, stop_token_ids: Sequence[int]) -> None:
        missing = len(stop_token_ids) - self._stops.shape[1]
        if missing > 0:
            self._stops = np.pad(self._stops, ((0, 0), (0, missing)), constant_values=-1)
        self._stops[row] = -1
        self._stops[row, : len(stop_token_ids)] = stop_token_ids

    def _exchange(self, first: int, second: int) -> None:
        """Swap two rows with all that belongs to them."""
        if first == second:
            return
        used_first, used_second = int(self._numbers[first, CACHED]), int(self._numbers[second, CACHED])
        if used_first and used_second:
            self._cache.swap(first, second, max(used_first, used_second))
        elif used_first:
            self._cache.move(first, second, used_first)
        elif used_second:
            self._cache.move(second, first, used_second)
        for array in (self._tokens, self._logprobs, self._numbers, self._options, self._stops):
            array[[first, second]] = array[[second, first]]
        self._seats[first], self._seats[second] = self._seats[second], self._seats[first]
        for row in (first, second):
            seat = self._seats[row]
            if seat is not None:
                seat.row = row


def _similar(fills: Sequence[_Fill]) -> list[list[_Fill]]:
    """Group pieces for a forward each, not too large; padding at most doubles the work, or is too little to matter."""
    groups: list[list[_Fill]] = []
    for fill in sorted(fills, key=lambda fill: fill.start - fill.end):
        widest = groups[-1][0].end - groups[-1][0].start if groups else 0
        padded = (len(groups[-1]) + 1) * widest if groups else 0
        if groups and padded <= (_LARGE_FILL if 2 * (fill.end - fill.start) >= widest else _SMALL_FILL):
            groups[-1].append(fill)
        else:
            groups.append([fill])
    return groups
