"""How Sphinx builds the site from docs/: `make site`. It loads nothing from a network and works from a folder."""

from __future__ import annotations

import argparse
import os
import re
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))  # the package of this checkout, wherever another one is installed

import mgpu_ops  # noqa: E402

for public in mgpu_ops.__all__:  # classes under their public names: MatmulConfig, not the Config of mgpu_ops.matmul.problem
    if isinstance(found := getattr(mgpu_ops, public), type):
        found.__name__ = found.__qualname__ = public
        found.__module__ = "mgpu_ops"

project, author = "mgpu_ops", "The authors of mgpu_ops"
copyright = author  # the footer's line
version = release = mgpu_ops.__version__
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx_copybutton", "sphinx_design"]

# Pages are the Markdown that a repository shows as well; the colon fences of the start page are its only exception.
myst_enable_extensions = ["attrs_block", "attrs_inline", "colon_fence"]
myst_heading_anchors = 3

smartquotes = False  # "t" is a value
highlight_language = "sh"  # of blocks that name none: commands
default_role = "code"  # docstrings write `names` as Markdown does
autodoc_typehints = "signature"
autodoc_typehints_format = "short"
autodoc_preserve_defaults = True
autodoc_type_aliases = {name: name for name in ("ArrayLike", "DTypeLike")}  # not what they stand for
python_maximum_signature_line_length = 88
napoleon_use_param = napoleon_use_rtype = False

html_theme = "furo"
html_title = "mgpu_ops"
html_static_path = ["_static"]
html_css_files = ["style.css"]
html_copy_source = False
html_show_sphinx = False
html_show_search_summary = False  # it would fetch pages, which a browser refuses to a page of a folder
html_theme_options = {
    "light_css_variables": {"color-brand-primary": "#0b5f85", "color-brand-content": "#0b5f85"},
    "dark_css_variables": {"color-brand-primary": "#6cc0e5", "color-brand-content": "#6cc0e5"},
}

_FENCES = re.compile(r"(^ *```.*?^ *```$)", re.DOTALL | re.MULTILINE)
_NAMED = re.compile(r"(?<!\[)`((?:docs|results)/[\w./+-]+\.\w+)`(?!\])")
_FIELD = re.compile(r"^((?:\w+(?:, )?)+): ")


def commands() -> str:
    """The help of each command of mgpu-tune."""
    from mgpu_ops.tuning import cli

    os.environ["COLUMNS"] = "88"  # by which argparse wraps
    texts = []
    for name, what in cli.COMMANDS.items():
        parser = cli._parser([name])
        (choices,) = (action.choices for action in parser._actions if isinstance(action, argparse._SubParsersAction))
        texts.append(f"## {name}\n\n{what[:1].upper()}{what[1:]}.\n\n```text\n{choices[name].format_help()}```\n")
    return "\n".join(texts)


def links(app: Any, name: str, source: list[str]) -> None:
    """Where a page names a file of results/ or another page in passing, as `results/...`, it links to it."""
    if name == "reference/commands":
        source[0] = source[0].replace("<!-- commands -->\n", commands())
    up = "../" * (name.count("/") + 1)

    def link(match: re.Match[str]) -> str:
        here = match[1] == f"docs/{name}.md"
        return f"[`{match[1]}`]({up}{match[1]})" if (ROOT / match[1]).is_file() and not here else match[0]

    parts = _FENCES.split(source[0])
    source[0] = "".join(part if i % 2 else _NAMED.sub(link, part) for i, part in enumerate(parts))


def fields(app: Any, what: str, name: str, obj: Any, options: Any, lines: list[str]) -> None:
    """The lines "field, field: what they are" of a dataclass's docstring become a list."""
    if what == "class":
        lines[:] = [_FIELD.sub(r"* **\1**: ", line) for line in lines]


def signature(app: Any, what: str, name: str, obj: Any, options: Any, arguments: str | None, returned: str | None) -> Any:
    """`ArrayLike | None` is written so: Sphinx writes what it has as the name of a type, in a union, as a call."""
    plain = [text and re.sub(r"TypeAliasForwardRef\('(\w+)'\)", r"\1", text) for text in (arguments, returned)]
    return tuple(plain)


def setup(app: Any) -> None:
    app.connect("source-read", links)
    app.connect("autodoc-process-signature", signature)
    app.connect("autodoc-process-docstring", fields)
