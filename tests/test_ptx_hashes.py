"""`scripts/ptx_hashes.py` tells a kernel that changed from one that was renamed or moved."""

from __future__ import annotations

import json

import pytest

from mgpu_ops.core import aot
from scripts import ptx_hashes

needs_compiler = pytest.mark.skipif(aot.available() is not None, reason=str(aot.available()))

PTX = """//
.version 9.0
	// .globl	old_name
.visible .entry old_name(
	.param .u64 .ptr .align 256 old_name_param_0
)
{
$L__func_begin0:
	.loc	1 207 0
	ld.param::entry.b64 	%rd20, [old_name_param_0];
$L__tmp0:
$L__BB0_1:
	// begin inline asm
	bar.sync 1, 128;
	// end inline asm
	bra $L__BB0_1;
$L__func_end0:
}
	.section	.debug_macinfo	{	}
	.file	1 "/somewhere/old.py"
"""


def test_names_lines_files_and_comments_do_not_count():
    moved = PTX.replace("old_name", "mgpu_new").replace("207 0", "31 4").replace("/somewhere/old.py", "/elsewhere/new.py")
    moved = moved.replace("$L__tmp0:\n", "$L__tmp0:\n\t.loc\t1 208 1\n$L__tmp1:\n").replace("begin inline", "inline")
    assert ptx_hashes.hash_of([moved]) == ptx_hashes.hash_of([PTX])


@pytest.mark.parametrize(("old", "new"), [("128", "256"), ("param_0]", "param_1]"), ("bra $L__BB0_1", "bra $L__BB0_2")])
def test_instructions_count(old, new):
    assert ptx_hashes.hash_of([PTX.replace(old, new)]) != ptx_hashes.hash_of([PTX])


def test_the_order_of_several_kernels_does_not_count_but_their_number_does():
    other = PTX.replace("bar.sync", "barrier.sync")
    assert ptx_hashes.hash_of([PTX, other]) == ptx_hashes.hash_of([other, PTX])
    assert ptx_hashes.hash_of([PTX, PTX]) != ptx_hashes.hash_of([PTX])
    assert ptx_hashes.hash_of([]) == ptx_hashes.NO_KERNEL


def test_differences_are_told_for_the_ops_asked_for():
    before = ["1 h200/matmul {} {}", "2 h200/all_reduce {} {}", '3 h200/matmul {"m": 8} {}']
    now = ["9 h200/matmul {} {}", '4 h200/matmul {"m": 16} {}']
    assert ptx_hashes.differences(before, before, ["matmul"]) == []
    assert ptx_hashes.differences(before, now, ["matmul"]) == [
        "changed: h200/matmul {} {}: 1 -> 9",
        'gone: h200/matmul {"m": 8} {}',
        'new: h200/matmul {"m": 16} {}',
    ]


@needs_compiler
def test_a_shipped_config_has_one_hash_and_another_config_another():
    case = next(ptx_hashes.shipped(["matmul"]))
    gpu_key, op, problem, config = case
    deeper = json.loads(config)
    deeper["max_concurrent_steps"] -= 1
    first = ptx_hashes.hash_case(case)
    assert ptx_hashes.hash_case(case) == first
    assert ptx_hashes.hash_case((gpu_key, op, problem, json.dumps(deeper))) not in (first, ptx_hashes.NO_KERNEL)


@needs_compiler
def test_a_collective_that_is_left_to_xla_has_no_kernel():
    cases = [case for case in ptx_hashes.shipped(["all_reduce"]) if '"xla"' in case[3]]
    assert ptx_hashes.hash_case(cases[0]) == ptx_hashes.NO_KERNEL
