"""Problems as text, as tables, benchmarks and the command line write them, and back."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from mgpu_ops.grouped.sizes import SPREADS
from mgpu_ops.registry.spec import OpSpec
from mgpu_ops.tuning import suites


def label(spec: OpSpec, name: str, problem: Any) -> str:
    """As text: "square-4096 4096x4096x4096 bfloat16 nn"; only shapes of the op, and problems of its suites, have a name."""
    named = name if suites.named(spec, name) == problem else _shape_name(spec, problem)
    return " ".join(filter(None, (named, describe(problem))))


def _shape_name(spec: OpSpec, problem: Any) -> str | None:
    return next((name for name, shape in spec.shapes.items() if shape == problem), None)


_WORDS = {"layout", "activation", "spread"}  # fields of problems whose values say what they are


def describe(problem: Any) -> str:
    """Sizes, dtype and the rest: "4096x4096x4096 bfloat16->float32 nt batch=8", "4096x512x256 g=8 bfloat16 nn random".

    A number or text that has a default, and is no word of its own, is told by name where it is another:
    "8192x8192x32x8x128 bfloat16 window_left=4095 causal".
    """
    fields = dataclasses.asdict(problem)
    of_op = {f.name: f.default for f in dataclasses.fields(problem)}
    usual = {name: default for name, default in of_op.items() if name not in _WORDS}
    batch, groups, dtype = fields.pop("batch", 1), fields.pop("groups", None), fields.pop("dtype", None)
    out_dtype = fields.pop("out_dtype", dtype)
    needed = {key for key, default in usual.items() if default is dataclasses.MISSING}
    sizes = "x".join(str(value) for key, value in fields.items() if key in needed)
    dtypes = dtype if dtype == out_dtype else f"{dtype}->{out_dtype}"
    words = [fields[key] for key in fields if key in _WORDS and not (key == "activation" and fields[key] == of_op[key])]
    words += [f"{k}={v}" for k, v in fields.items() if k not in needed | _WORDS and type(v) is not bool and v != usual[k]]
    flags = [key for key, value in fields.items() if value is True]
    many = f"batch={batch}" if batch != 1 else None
    ragged = f"g={groups}" if groups is not None else None
    return " ".join(filter(None, (sizes, ragged, dtypes, *words, *flags, many)))


def problem_of(spec: OpSpec, text: str) -> Any:
    """The problem that `label` wrote. ValueError where it is none of this op."""
    first, _, rest = text.partition(" ")
    named = spec.shapes.get(first)
    if named is not None and rest == describe(named):
        return named
    for words in (text.split(), rest.split()):  # a name that is no longer known may stand first
        try:
            problem = spec.Problem(**_fields_of(spec, words))
        except (KeyError, TypeError, ValueError, IndexError):
            continue
        if describe(problem) == " ".join(words):
            return problem
    raise ValueError(f"{text!r} is no problem of {spec.name}: write it as {describe(next(iter(spec.shapes.values())))!r}")


def _fields_of(spec: OpSpec, words: Sequence[str]) -> dict[str, Any]:
    """What `describe` tells of a problem: first its sizes, then the dtypes, then the rest."""
    known = {field.name: field for field in dataclasses.fields(spec.Problem)}
    apart = {"batch": 1} if "batch" in known else {}  # told at the end, if it is not 1
    found: dict[str, Any] = dict(apart)
    sizes = [name for name, field in known.items() if field.default is dataclasses.MISSING and name not in ("batch", "groups")]
    found |= {name: int(size) for name, size in zip(sizes, words[0].split("x"), strict=True)}
    for word in words[1:]:
        key, equals, value = word.partition("=")
        if equals:
            key = {"g": "groups"}.get(key, key)
            found[key] = int(value) if str(known[key].type) == "int" else value
        elif word in known:
            found[word] = True
        elif "dtype" not in found:
            found["dtype"], _, out_dtype = word.partition("->")
            found |= {"out_dtype": out_dtype or found["dtype"]} if "out_dtype" in known else {}
        else:
            found["layout" if set(word) <= set("nt") else "spread" if word in SPREADS else "activation"] = word
    return found
