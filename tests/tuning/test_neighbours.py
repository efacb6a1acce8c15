"""Which GPUs there are and who uses them, as `nvidia-smi` tells it: here a script that answers like it."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from mgpu_ops.tuning import neighbours

Says = Callable[..., None]


@pytest.fixture
def says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Says:
    """What nvidia-smi answers to queries that contain a word."""
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")

    def answers(**lines: str) -> None:
        cases = "".join(f"*{word}*) printf '{text}';;\n" for word, text in lines.items())
        script = tmp_path / "nvidia-smi.new"  # the old one may be running, and a running file cannot be written
        script.write_text(f'#!/bin/sh\ncase "$*" in\n{cases}*) exit 6;;\nesac\n')
        script.chmod(0o755)
        script.replace(tmp_path / "nvidia-smi")

    return answers


def test_the_gpus_are_those_that_cuda_shows_else_all(says: Says, monkeypatch: pytest.MonkeyPatch) -> None:
    says(index=r"0\n1\n2\n3\n")
    assert neighbours.visible() == ["0", "1", "2", "3"]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-8f1c, 3")
    assert neighbours.visible() == ["GPU-8f1c", "3"]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert neighbours.visible() == []


def test_others_are_those_that_are_not_ours(says: Says) -> None:
    says(pid=r"17, /usr/bin/python3\n4711, train, v2\n")
    assert neighbours.others("0", {17}) == ["train, v2 (pid 4711)"]
    assert neighbours.others("0", {17, 4711}) == []


def test_where_processes_have_other_numbers_one_of_them_is_ours(says: Says) -> None:
    """As in a container: it counts its processes from 1, nvidia-smi those of the host."""
    says(pid=r"90001, python\n")
    assert neighbours.others("0", {17}) == []
    says(pid=r"90001, python\n90002, train\n")
    assert neighbours.others("0", {17}) == ["train (pid 90002)"]


@pytest.mark.parametrize("listed", ["", r"[N/A], [Not Found]\n", r"No running processes found\n"])
def test_what_nvidia_smi_does_not_tell_is_nobody(says: Says, listed: str) -> None:
    says(pid=listed)
    assert neighbours.others("0", {17}) == []


def test_without_nvidia_smi_or_where_it_fails_nobody_is_seen(says: Says) -> None:
    assert neighbours.others("0", {17}) == []
    says(nothing="")
    assert neighbours.others("0", {17}) == []
    assert neighbours.memory_in_use("0") == 0


def test_memory_in_use_counts_beyond_what_an_idle_gpu_has(says: Says) -> None:
    says(memory=r"612\n")
    assert neighbours.memory_in_use("0") == 0
    says(memory=r"70001\n")
    assert neighbours.memory_in_use("0") == 70001
    says(memory=r"[N/A]\n")
    assert neighbours.memory_in_use("0") == 0


def test_a_watch_says_who_comes_while_it_is_open(says: Says, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(neighbours, "_EVERY", 0.01)
    says(memory=r"0\n", pid=r"17, python\n")
    seen, came = [], threading.Event()

    def say(text: str) -> None:
        seen.append(text)
        came.set()

    watch = neighbours.Watch("1", lambda: {17}, say)
    try:
        assert not came.wait(0.1)
        says(pid=r"17, python\n18, train\n")
        assert came.wait(10)
    finally:
        watch.close()
    assert seen[0] == "another process uses GPU 1: train (pid 18); times may be off"


def test_a_watch_says_what_memory_was_taken_before(says: Says) -> None:
    says(memory=r"70001\n", pid="")
    seen, came = [], threading.Event()

    def say(text: str) -> None:
        seen.append(text)
        came.set()

    watch = neighbours.Watch("1", lambda: {17}, say)
    assert came.wait(10)
    watch.close()
    assert seen == ["another process holds 70001 MiB on GPU 1; times may be off"]
