"""What README says about speed, computed from the benchmarks in results/.

    python scripts/figures.py            prints the tables
    python scripts/figures.py --write    puts them into README.md, between its marks

A table names its CSV files. Of several files with the same problem, the one with the newest date in its name counts. "x" is the
other's time over ours, so that 1.10x is 10 % faster and 0.90x slower; means are geometric.
"""

from __future__ import annotations

import argparse
import csv
import math
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
MARKS = re.compile(r"(<!-- figures: (\w+) -->\n).*?(<!-- end of figures -->\n)", re.DOTALL)
HEAD = ("| | beside | problems | mean | worst | best | below 1x |", "|---|---|---|---|---|---|---|")

Row = dict[str, str]
Ratio = Callable[["Problem"], float]


@dataclass(frozen=True)
class Problem:
    """What was timed in turn on one problem: a row for each implementation."""

    name: str  # square-2048
    shape: tuple[int, ...]  # (2048, 2048, 2048)
    file: Path
    rows: dict[str, Row]

    def us(self, impl: str) -> float:
        return float(self.rows[impl]["median_us"])

    def rate(self, impl: str) -> float:
        return float(self.rows[impl]["tflops"])


def newest(results: Path, what: str) -> Iterator[tuple[Path, list[Row]]]:
    """The CSV files results/<date>-<what>.csv, oldest first, where `what` is a regular expression."""
    for path in sorted(results.glob("*.csv")):
        if re.fullmatch(r"\d{4}-\d\d-\d\d-" + what, path.stem):
            with path.open(newline="", encoding="utf-8") as stream:
                yield path, list(csv.DictReader(stream))


def problems(results: Path, what: str) -> list[Problem]:
    """Of the benchmarks `what`, each problem from the newest file that has it. LookupError where there is none."""
    found: dict[tuple[str, str], Problem] = {}
    for path, rows in newest(results, what):
        here: dict[tuple[str, str], dict[str, Row]] = {}
        for row in rows:
            here.setdefault((row["op"], row["problem"]), {})[row["impl"]] = row
        for key, impls in here.items():
            name, shape = key[1].split()[:2]
            found[key] = Problem(name, tuple(int(n) for n in shape.split("x")), path, impls)
    if not found:
        raise LookupError(f"{results} has no benchmark {what}")
    return list(found.values())


# --- lines of tables


def line(what: str, beside: str, found: Iterable[Problem], *competitors: str, ratio: Ratio | None = None) -> str:
    """A line of a table: geometric mean, extremes with the problems they belong to, and how many are below 1.

    ratio: by default the time of the fastest of `competitors` over ours. Problems that one of them did not run are left out.
    """
    ratio = ratio or (lambda p: min(p.us(competitor) for competitor in competitors) / p.us("mgpu_ops"))
    ratios = sorted((ratio(p), p.name) for p in found if {*competitors} <= p.rows.keys())
    if not ratios:
        raise LookupError(f"no problem of {what!r} was timed beside {', '.join(competitors)}")
    (worst, worst_name), (best, best_name) = ratios[0], ratios[-1]
    mean = math.exp(math.fsum(math.log(r) for r, _ in ratios) / len(ratios))
    below = sum(r < 1 for r, _ in ratios)
    cells = (what, beside, len(ratios), f"{mean:.3f}x", f"{worst:.3f}x ({worst_name})", f"{best:.3f}x ({best_name})", below)
    return f"| {' | '.join(map(str, cells))} |"


def of_dense(p: Problem) -> float:
    return p.rate("mgpu_ops") / p.rate("dense")


def sources(*files: Path) -> Iterator[str]:
    """Where a table is from, and the picture that lies beside the first file."""
    found = list(dict.fromkeys(files))
    yield f"\nFrom {', '.join(f'`results/{path.name}`' for path in found)}."
    if found[0].with_suffix(".png").exists():
        yield f"\n![{found[0].stem}](results/{found[0].stem}.png)"


def files(*groups: list[Problem]) -> list[Path]:
    return [p.file for group in groups for p in group]


# --- the tables


def matmul(results: Path) -> Iterator[str]:
    forward, both = problems(results, r"h200-matmul"), problems(results, r"h200-matmul\+grad")
    yield from HEAD
    for what, found in (("forward", forward), ("forward + backward", both)):
        yield line(what, "XLA (cuBLAS)", found, "xla")
        yield line(f"{what}, m >= 2048", "XLA (cuBLAS)", [p for p in found if p.shape[0] >= 2048], "xla")
        for m in sorted({p.shape[0] for p in found if p.shape[0] < 2048}):
            yield line(f"{what}, m = {m}", "XLA (cuBLAS)", [p for p in found if p.shape[0] == m], "xla")
    yield line("forward", "JAX's sample kernel, tuned", forward, "jax-pallas")
    yield from sources(*files(forward, both))


def grouped_matmul(results: Path) -> Iterator[str]:
    training, decoding = problems(results, "h200-grouped_matmul-training"), problems(results, "h200-grouped_matmul-decoding")
    dlhs, drhs = problems(results, "h200-grouped_matmul-dlhs"), problems(results, "h200-ragged_contraction")
    dense, jax, tokamax = "rate of one dense matmul (cuBLAS)", "JAX's kernel, tuned", "tokamax, tuned"
    yield from HEAD
    yield line("training", dense, training, "dense", ratio=of_dense)
    yield line("gradient of lhs", dense, dlhs, "dense", ratio=of_dense)
    yield line("gradient of rhs", dense, drhs, "dense", ratio=of_dense)
    yield line("training", jax, training, "jax-pallas")
    yield line("training", tokamax, training, "tokamax")
    yield line("training", "the faster of the two", training, "jax-pallas", "tokamax")
    yield line("gradient of lhs", jax, dlhs, "jax-pallas")
    yield line("gradient of rhs", jax, drhs, "jax-pallas")
    yield line("decoding", jax, decoding, "jax-pallas")
    yield line("decoding", tokamax, decoding, "tokamax")
    yield line("decoding", "the faster of the two", decoding, "jax-pallas", "tokamax")
    rates = [float(p.rows["mgpu_ops"]["gbs"]) / 1000 for p in decoding]
    yield f"\nDecoding moves {min(rates):.1f} to {max(rates):.1f} TB/s."
    yield from sources(*files(training, decoding, dlhs, drhs))


def flash_attention(results: Path) -> Iterator[str]:
    forward, both = problems(results, "h200-flash_attention"), problems(results, "h200-flash_attention[+-]grad.*")
    yield from HEAD
    for what, found in (("forward", forward), ("forward + backward", both)):
        yield line(what, "cuDNN", found, "cudnn")
        for dim in sorted({p.shape[-1] for p in found}):
            yield line(f"{what}, head dim {dim}", "cuDNN", [p for p in found if p.shape[-1] == dim], "cudnn")
    yield line("forward", "tokamax, tuned", forward, "tokamax")
    yield line("forward", "the faster of the two", forward, "cudnn", "tokamax")
    yield from sources(*files(forward, both))


def size(n: int) -> str:
    return next(f"{n // scale} {unit}" for scale, unit in ((2**20, "MiB"), (2**10, "KiB"), (1, "B")) if n >= scale)


def collectives(results: Path) -> Iterator[str]:
    """Of what a call adds to a chain of calls: XLA's time over ours."""
    ops = ("all_reduce", "reduce_scatter", "all_gather")
    found = {
        (int(row["devices"]), row["op"], int(row["bytes"])): p
        for p in problems(results, rf"h200(x\d+)?-({'|'.join(ops)})(-.*)?")
        if "bfloat16" in (row := p.rows["xla"])["problem"]
    }
    keys = sorted(found, key=lambda key: (key[0], ops.index(key[1]), key[2]))

    def cell(devices: int, op: str, payload: int, impl: str) -> str:
        p = found.get((devices, op, payload))
        if p is None or impl not in p.rows:
            return ""
        if impl == "mgpu_ops" and p.rows[impl]["config"].startswith("algorithm=xla "):
            return "XLA runs"
        return f"{p.us('xla') / p.us(impl):.2f}x"

    columns = list(
        dict.fromkeys((*key[:2], impl) for key in keys for impl in sorted(found[key].rows) if impl.startswith("mgpu_ops"))
    )
    columns.sort(key=lambda column: (column[0], ops.index(column[1])))
    titles = [f"{n} GPUs: {op}{impl.removeprefix('mgpu_ops')}" for n, op, impl in columns]
    yield f"| payload | {' | '.join(titles)} |"
    yield "|---" * (1 + len(columns)) + "|"
    for payload in sorted({key[2] for key in keys}):
        yield f"| {size(payload)} | {' | '.join(cell(n, op, payload, impl) for n, op, impl in columns)} |"
    yield from sources(*(found[key].file for key in keys))


TABLES: dict[str, Callable[[Path], Iterator[str]]] = {
    "matmul": matmul,
    "grouped_matmul": grouped_matmul,
    "flash_attention": flash_attention,
    "collectives": collectives,
}


def filled(text: str, results: Path) -> str:
    """`text` with what is between its marks `<!-- figures: NAME -->` and `<!-- end of figures -->` computed anew."""
    return MARKS.sub(lambda match: match[1] + "\n".join(TABLES[match[2]](results)) + "\n" + match[3], text)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="replace the tables in README.md")
    if parser.parse_args().write:
        readme = ROOT / "README.md"
        readme.write_text(filled(readme.read_text(), ROOT / "results"))
        return
    for name, table in TABLES.items():
        print(f"\n{name}\n\n" + "\n".join(table(ROOT / "results")))


if __name__ == "__main__":
    main()
