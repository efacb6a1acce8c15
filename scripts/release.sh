#!/usr/bin/env bash
# `make release`: builds sdist and wheel into dist/, checks them, and runs the demo from the wheel in a clean environment.
# At a tag v1.2.3 the result can be published; anywhere else it is a rehearsal, and says so.
set -euo pipefail
cd "$(dirname "$0")/.."
root=$PWD python=${PYTHON:-.venv/bin/python}

say() { printf 'release: %s\n' "$*" >&2; }
die() { say "$@"; exit 1; }

[ -z "$(git status --porcelain)" ] || die "commit or remove what is not committed (git status): a release is what git has"
version=$("$python" -c 'import mgpu_ops; print(mgpu_ops.__version__)')
if tag=$(git describe --exact-match --tags --match 'v[0-9]*' 2>/dev/null); then
  [ "$tag" = "v$version" ] || die "the tag is $tag, but the version is $version"
  grep -q "^## \[$version\] - " CHANGELOG.md || die "CHANGELOG.md has no section '## [$version] - <date>': see CONTRIBUTING.md"
else
  say "no tag v1.2.3 at this commit: a rehearsal with version $version, not to be published"
fi

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
"$python" -m venv "$work/tools"
"$work/tools/bin/python" -m pip install -q --disable-pip-version-check 'build>=1.2' 'twine>=6'

rm -rf dist
"$work/tools/bin/python" -m build --outdir dist . >"$work/build.log" 2>&1 || { cat "$work/build.log" >&2; die "the build failed"; }
"$work/tools/bin/python" -m twine check --strict dist/*
[ "$(ls dist | wc -l)" = 2 ] || die "dist/ has more than an sdist and a wheel: $(ls dist)"

# As a user installs it: an environment with nothing in it, from a folder with nothing of the checkout.
extras=tune,aot
if nvidia-smi -L >/dev/null 2>&1; then extras=tune,cuda13; fi
say "installing the wheel with [$extras] into a clean environment (some minutes and 2 GB)"
"$python" -m venv "$work/clean"
"$work/clean/bin/python" -m pip install -q --disable-pip-version-check "$(ls "$root"/dist/*.whl)[$extras]"
cd "$work"
unset PYTHONPATH
installed=$("$work/clean/bin/python" -c 'import mgpu_ops; print(mgpu_ops.__version__)')
[ "$installed" = "$version" ] || die "the wheel says version $installed, the checkout $version"
MGPU_OPS_CONFIG_DIR=$work/configs MGPU_OPS_STATE_DIR=$work/state "$work/clean/bin/mgpu-tune" demo || die "the demo failed"
say "good: $(cd "$root" && echo dist/*)"
