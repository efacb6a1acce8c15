"""The kernel that routes few tokens and sorts them by expert: one block, whose warps share the tokens.

A warp takes its tokens one after the other. Its threads have some of a token's logits each, as integers with the same order. In
each of top_k rounds the warp finds the largest that remains and puts the round's number in its place: after them each thread
knows the token's choices among its own experts.

The sort compares no assignments. A token has an expert once at most, so each warp counts its tokens of each expert and the
warps exchange the counts, a byte each. The sum of an expert's bytes is its group's size, the sum over all earlier experts is
where the group begins, and the sum of earlier warps' bytes is where the warp's own tokens are in it.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu

from mgpu_ops.core import engine, lanes
from mgpu_ops.core.limits import WARP, WARPGROUP
from mgpu_ops.sorting import in_order

MOST_TOKENS = 255  # of an expert: the counts of all warps add up to one byte

_WARPS = WARPGROUP // WARP
_WARPGROUPS = 4  # at most: one warp hides the latency of another, and all have 128 registers for each thread
_UNROLLED = 64  # keys of a thread times choices, at most, where the choices are no loop
_CHOSEN = -(2**31)  # the key of a token's first choice once it is found; that of its k-th is larger by k
_NONE = _CHOSEN + WARP  # the key of no expert, less than those of all logits
_COUNT = 16  # from this bit on: how many of the warp's tokens have had an expert. Below: where the expert lies


def launch(logits: jax.Array, top_k: int, normalised: bool, *, interpret: bool = False) -> tuple[jax.Array, ...]:
    """The token and the weight of each assignment, sorted, both [tokens * top_k]; sizes [experts]; places [tokens, top_k].

    logits: float32 [tokens, experts], of 1 to `MOST_TOKENS` tokens. top_k: 1 to 32, no more than experts.
    normalised: the weights of a token sum to 1; else the softmax is over all experts.
    """
    (tokens, experts), count = logits.shape, logits.shape[0] * top_k
    if not (0 < tokens <= MOST_TOKENS and 0 < top_k <= min(experts, WARP)):
        raise ValueError(
            f"{tokens} tokens, {experts} experts and top_k={top_k}: the kernel takes 1 to {MOST_TOKENS} tokens, and a top_k of "
            f"1 to {WARP} that is no more than the experts; XLA routes others"
        )
    shape = _Shape(tokens, experts, top_k, normalised)

    def body(logits: Any, *outs: Any, barrier: Any, **shared: Any) -> None:
        own, group = engine.warp(), lax.axis_index("wg") if shape.warpgroups > 1 else jnp.int32(0)
        refs = {name: ref.at[group] for name, ref in shared.items()}

        def by_each_warp(work: Callable[[_Warp], None]) -> None:
            if own is None:  # interpreted, one after the other
                lax.fori_loop(0, _WARPS, lambda i, _: work(_Warp(shape, group, i, logits, refs)), None)
            else:
                work(_Warp(shape, group, own, logits, refs))

        by_each_warp(_Warp.choose)
        barrier.wait()
        by_each_warp(lambda warp: warp.sort(shared["counts"], *outs))

    int32 = functools.partial(jax.ShapeDtypeStruct, dtype=jnp.int32)
    of_tokens, of_weights, sizes, places = engine.kernel(
        body,
        engine.Launch(
            "mgpu_ops_moe_route",
            {"block": 1},
            shape.warpgroups,
            approx_math=True,
            interpret=interpret,
            reduces_across_warps=False,
        ),
        out_type=(int32((count,)), jax.ShapeDtypeStruct((count,), jnp.float32), int32((experts,)), int32((count,))),
        scratch_types=shape.scratch(),
    )(logits.reshape(tokens * experts))
    return of_tokens, of_weights, sizes, places.reshape(tokens, top_k)


@dataclasses.dataclass(frozen=True)
class _Shape:
    """Of the problem, and of the block that solves it."""

    tokens: int
    experts: int
    top_k: int
    normalised: bool

    @property
    def warpgroups(self) -> int:
        return min(_WARPGROUPS, math.ceil(self.tokens / _WARPS))

    @property
    def each(self) -> int:
        """Tokens of a warp, at most."""
        return math.ceil(self.tokens / (_WARPS * self.warpgroups))

    @property
    def share(self) -> int:
        """Experts of a thread, at most."""
        return math.ceil(self.experts / WARP)

    @property
    def across(self) -> int:
        """Threads for the choices of a token."""
        return 1 << (self.top_k - 1).bit_length()

    def scratch(self) -> dict[str, Any]:
        """The barrier, and what a warpgroup has in shared memory. An expert lies there as in `_Warp.slot`.

        counts: of each expert a byte for each warp, how many of its tokens have it.
        begins: of each warp and expert, the place of the warp's first assignment to it.
        chosen: of each warp, token and choice, where the expert lies, and from bit _COUNT on how many tokens before have it, of
          the warp's.
        totals: of each warp and token, the sum over all experts, as bits.
        """

        def words(size: int, dtype: Any = jnp.int32) -> Any:
            return plgpu.SMEM((self.warpgroups, _WARPS * size), dtype)

        return {
            "barrier": engine.BlockBarrier(self.warpgroups),
            "counts": words(WARP * self.share, jnp.int8),
            "begins": words(WARP * self.share),
            "chosen": words(self.each * self.top_k),
            **({} if self.normalised else {"totals": words(self.each)}),
        }


class _Assignment(NamedTuple):
    """A token's choice, where the expert lies, how many of the warp's tokens before have it too. here: whether it is one."""

    token: jax.Array
    choice: jax.Array
    slot: jax.Array
    earlier: jax.Array
    weight: jax.Array
    here: jax.Array


@dataclasses.dataclass(frozen=True)
class _Warp:
    """One warp of the block. A thread's experts are neighbours: of equal logits, the first thread has the first expert's.

    group, own: its warpgroup, and which of the four warps there it is. shared: by name, as in `_Shape.scratch`.
    """

    shape: _Shape
    group: jax.Array
    own: jax.Array
    logits: Any
    shared: dict[str, Any]

    @property
    def first(self) -> jax.Array:
        """The warp's first token."""
        return (self.group * _WARPS + self.own) * self.shape.each

    @property
    def count(self) -> jax.Array:
        """How many tokens it has."""
        return jnp.clip(self.shape.tokens - self.first, 0, self.shape.each)

    def expert(self, i: int) -> jax.Array:
        """The number of this thread's i-th expert. In the last threads it may be none."""
        return lanes.number() * self.shape.share + i

    def slot(self, i: int) -> jax.Array:
        """Where that expert lies in shared memory: the threads' i-th ones are neighbours, and in different banks."""
        return lanes.number() + i * WARP

    def choose(self) -> None:
        """Leaves in shared memory the choices of the warp's tokens, and how many of them each expert has."""
        s = self.shape

        def of_token(i: jax.Array, carry: Any) -> Any:
            slots, logits = carry
            following = self._read(i + 1) if s.each > 1 else logits  # of which the rounds below hide the latency
            keys, token = self._keys(logits), self.own * s.each + i
            if not s.normalised:
                total = lanes.total(_sum_of_exponentials(keys))
                lanes.store(self.shared["totals"], token, lanes.bits_of(total), lanes.number() == 0)
            keys = _marked(keys, s.top_k)
            for slot, key in zip(slots, keys, strict=True):
                lanes.store(self.shared["chosen"], token * s.top_k + (key - _CHOSEN), slot, key < _NONE)
            return [
                jnp.where(key < _NONE, slot + (1 << _COUNT), slot) for slot, key in zip(slots, keys, strict=True)
            ], following

        slots = [self.slot(i) for i in range(s.share)]
        slots, _ = lax.fori_loop(0, self.count, of_token, (slots, self._read(jnp.int32(0))))
        for i, slot in enumerate(slots):
            lanes.store(self.shared["counts"], self.slot(i) * _WARPS + self.own, slot >> _COUNT)

    def _read(self, i: jax.Array) -> list[jax.Array]:
        """The bits of this thread's logits of the warp's i-th token, or of some other where it has none."""
        s, found = self.shape, []
        row = jnp.minimum(self.first + i, s.tokens - 1) * s.experts
        at_once = math.gcd(s.share, s.experts, 4)
        for j in range(0, s.share, at_once):
            here = None if s.experts == WARP * s.share else self.expert(j) < s.experts
            found += lanes.load_global(self.logits, row + self.expert(j), at_once, here)
        return found

    def _keys(self, logits: list[jax.Array]) -> list[jax.Array]:
        keys = [_key(logit) for logit in logits]
        if self.shape.experts == WARP * self.shape.share:
            return keys
        return [jnp.where(self.expert(i) < self.shape.experts, key, _NONE) for i, key in enumerate(keys)]

    def sort(self, counts: Any, of_tokens: Any, of_weights: Any, sizes: Any, places: Any) -> None:
        """Stores what `launch` returns of the warp's tokens. counts: of all warpgroups."""
        s, outs = self.shape, (of_tokens, of_weights, places)
        at_once = WARP // s.across
        if s.each <= at_once:  # weights and sums are computed at the same time
            assignments = self._weigh(jnp.int32(0))
            self._begin(counts, sizes)
            self._store(assignments, *outs)
            return
        self._begin(counts, sizes)
        times = lax.div(self.count + at_once - 1, jnp.int32(at_once))
        lax.fori_loop(0, times, lambda i, _: self._store(self._weigh(i * at_once), *outs), None)

    def _weigh(self, first: jax.Array) -> _Assignment:
        """The assignment of this thread, of those of the warp's tokens from `first` on: of as many as there are threads for."""
        s, number, readable = self.shape, lanes.number(), lanes.readable(self.logits)
        token, choice = first + (number >> s.across.bit_length() - 1), number & s.across - 1
        here = (token < self.count) & (choice < s.top_k)
        local, of_all = (jnp.where(here, t, 0) for t in (self.own * s.each + token, self.first + token))
        choice = jnp.where(here, choice, 0)
        chosen = jnp.where(here, lanes.load_shared(self.shared["chosen"], local * s.top_k + choice), 0)
        slot = chosen & (1 << _COUNT) - 1
        logit = readable[of_all * s.experts + (slot & WARP - 1) * s.share + (slot >> WARP.bit_length() - 1)]
        top = lanes.float_of(lanes.of_lane(lanes.bits_of(logit), number & -s.across))
        weight = jnp.where(here, jnp.exp(logit - top), 0.0)
        if s.normalised:
            total = lanes.total(weight, s.across)
        else:
            total = lanes.float_of(lanes.load_shared(self.shared["totals"], local))
        return _Assignment(of_all, choice, slot, chosen >> _COUNT, weight / total, here)

    def _store(self, of: _Assignment, of_tokens: Any, of_weights: Any, places: Any) -> None:
        s = self.shape
        place = lanes.load_shared(self.shared["begins"], self.own * WARP * s.share + of.slot) + of.earlier
        lanes.store(of_tokens, place, of.token, of.here)
        lanes.store(of_weights, place, of.weight, of.here)
        lanes.store(places, of.token * s.top_k + of.choice, place, of.here)

    def _begin(self, counts: Any, sizes: Any) -> None:
        """Stores the sizes of groups, and in shared memory where the warp's own tokens begin in each."""
        s = self.shape
        before = (1 << 8 * self.own) - 1  # the bytes of earlier warps
        masks = [jnp.where(self.group > i, -1, jnp.where(self.group == i, before, 0)) for i in range(s.warpgroups)]
        size, earlier = [], []
        for i in range(s.share):
            words = [lanes.load_shared(counts.at[group], self.slot(i)) for group in range(s.warpgroups)]
            size.append(_sum_of_bytes(words))
            earlier.append(_sum_of_bytes([word & mask for word, mask in zip(words, masks, strict=True)]))
        own = functools.reduce(jnp.add, size)
        begin = lanes.sums(own) - own
        for i in range(s.share):
            lanes.store(self.shared["begins"], self.own * WARP * s.share + self.slot(i), begin + earlier[i])
            here = (self.group == 0) & (self.own == 0) & (self.expert(i) < s.experts)
            lanes.store(sizes, self.expert(i), size[i], here)
            begin += size[i]
        lanes.warp_barrier()


def _marked(keys: list[jax.Array], top_k: int) -> list[jax.Array]:
    """The keys of all threads, of which the k-th largest is _CHOSEN + k for each k < top_k."""
    if top_k * len(keys) > _UNROLLED:
        found: list[jax.Array] = lax.fori_loop(0, top_k, lambda k, keys: lanes.mark_largest(keys, _CHOSEN + k), keys)
        return found
    for k in range(top_k):
        keys = lanes.mark_largest(keys, _CHOSEN + k)
    return keys


def _key(bits: jax.Array) -> jax.Array:
    return in_order(bits, _NONE)


def _sum_of_exponentials(keys: list[jax.Array]) -> jax.Array:
    """Of this thread's logits, less the largest of all threads."""
    top = lanes.float_of(_key(lanes.largest(functools.reduce(jnp.maximum, keys))))
    return functools.reduce(jnp.add, (jnp.where(key > _NONE, jnp.exp(lanes.float_of(_key(key)) - top), 0.0) for key in keys))


def _sum_of_bytes(words: list[jax.Array]) -> jax.Array:
    return lax.shift_right_logical(functools.reduce(jnp.add, words) * 0x01010101, 24)
