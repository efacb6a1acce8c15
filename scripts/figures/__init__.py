"""What README and docs/ say about speed, computed from the benchmarks in results/: tables and one picture.

    python -m scripts.figures            prints the tables
    python -m scripts.figures --write    puts them into README.md and docs/, between marks, and draws docs/images/speed.svg

A table names its CSV files. Of several files with the same problem, the one with the newest date in its name counts. "x" is the
other's time over ours, so that 1.10x is 10 % faster and 0.90x slower; means are geometric. "Earlier config" counts the problems
that were timed with another config than a call uses now (`tuning/bench/earlier.py`); a new benchmark of them brings it to 0.
"""

from __future__ import annotations

import argparse
import os
import re
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import jax

from scripts.figures import glance, ops, programs
from scripts.figures.picture import drawn

ROOT = Path(__file__).parents[2]
PICTURE = ROOT / "docs/images/speed.svg"
MARKS = re.compile(r"(<!-- figures: (\w+) -->\n).*?(<!-- end of figures -->\n)", re.DOTALL)

TABLES: dict[str, Callable[[Path], Iterator[str]]] = {
    table.__name__: table
    for table in (
        ops.matmul_roofline,
        ops.matmul,
        ops.flash_attention_roofline,
        ops.gated_matmul,
        ops.grouped_matmul_roofline,
        ops.grouped_matmul,
        ops.grouped_problems,
        ops.flash_attention,
        ops.quantized_matmul_roofline,
        ops.quantized_matmul,
        ops.cross_entropy,
        ops.moe,
        ops.moe_fp8,
        ops.moe_quantized,
        ops.collectives,
        programs.program,
        programs.program_h100,
        programs.program_models,
        programs.program_models_h100,
        programs.program_experts,
        programs.program_kernels,
        programs.compile_times,
        glance.h100,
        ops.model_error,
        glance.summary,
        glance.glance,
    )
}


def pages() -> list[Path]:
    """README.md and the pages of docs/ with marks `<!-- figures: NAME -->` and `<!-- end of figures -->`."""
    return [path for path in (ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))) if MARKS.search(path.read_text())]


def filled(text: str, results: Path, up: str = "") -> str:
    """`text` with what is between its marks computed anew. up: the way from its folder to that of results/."""

    def table(match: re.Match[str]) -> str:
        lines = "\n".join(TABLES[match[2]](results)).replace("](results/", f"]({up}results/")
        return f"{match[1]}{lines}\n{match[3]}"

    return MARKS.sub(table, text)


def of_page(path: Path) -> str:
    return filled(path.read_text(), ROOT / "results", "../" * (len(path.relative_to(ROOT).parts) - 1))


def picture(results: Path) -> str:
    """The picture of docs/speed.md, as SVG."""
    return drawn([(s.what, s.beside, s.mean, s.ratios) for s in glance.strips(results)])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="write the tables and the picture")
    write = parser.parse_args().write
    jax.config.update("jax_platforms", "cpu")
    for name in [name for name in os.environ if name.startswith("MGPU_OPS_")]:
        del os.environ[name]
    with tempfile.TemporaryDirectory() as empty:  # only shipped entries count
        os.environ["MGPU_OPS_CONFIG_DIR"] = empty
        if write:
            for path in pages():
                path.write_text(of_page(path))
            PICTURE.parent.mkdir(exist_ok=True)
            PICTURE.write_text(picture(ROOT / "results"))
            return
        for name, table in TABLES.items():
            print(f"\n{name}\n\n" + "\n".join(table(ROOT / "results")))
