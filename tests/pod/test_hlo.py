"""The reader of optimised programs, on short texts as a TPU's compiler prints them, and on compiled programs."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest
from toys.paths import TESTS

from sao_jax.pod.communication import axes_of, bytes_by_kind_and_axes, collectives, first_group
from sao_jax.pod.hlo import arrays_of, parse
from sao_jax.pod.matrix_products import kernels, largest_products, products
from sao_jax.pod.traffic import arrays_quadratic_in, hbm_bytes, hbm_bytes_by_operation, largest_arrays

MESH = {"data": 1, "fsdp": 2, "expert": 2, "tensor": 1, "context": 2}

# A loop of 48 layers, each of them a fusion, a product, and a loop of 3 rounds; the last loop depends on data.
LOOPS = (TESTS / "pod/loops.hlo").read_text(encoding="utf-8")

# An overlapped gather in three fusions, of which the first sends; a scatter that XLA writes as a sum; a gather over
# the whole mesh, which it writes as a sum too; a permutation along "context", and one that goes nowhere.
COMMUNICATION = (TESTS / "pod/communication.hlo").read_text(encoding="utf-8")


def test_types_are_read():
  arrays = arrays_of("(bf16[2,128]{1,0:T(8,128)(2,1)S(1)}, s4[6]{0}, /*index=2*/pred[]{:T(512)}, u32[]{:S(2)})")
  assert [str(array) for array in arrays] == ["bf16[2,128]", "s4[6]", "pred[]", "u32[]"]
  assert [array.bytes for array in arrays] == [512, 3, 1, 4]
  assert [array.in_hbm for array in arrays] == [False, True, True, False]


def test_loops_are_multiplied_out():
  program = parse(LOOPS, unknown_trips=8)
  assert program.entry == "main" and program.unknown_loops == ("rest",)
  # 48 layers, and 8 rounds of a loop that nobody knows the length of; the inner loop has 3 rounds in each.
  assert program.runs["body"] == 48 + 8 and program.runs["short_body"] == 3 * 56
  assert parse(LOOPS).runs["body"] == 49
  assert program.fused == {"fused"}


def test_a_line_that_the_metadata_of_a_kernel_breaks_goes_on():
  text = """ENTRY %main (x: f32[4,8]) -> f32[4,4] {
  %x = f32[4,8]{1,0} parameter(0)
  %k = f32[8,4]{1,0} custom-call(%x), custom_call_target="tpu_custom_call", frontend_attributes={kernel_metadata={
"xprof_metadata": "{\\"block\\": 512}"
}}, metadata={op_name="jit(f)/pallas_call"}, backend_config={"cost_estimate":{"flops":"64"}}
  ROOT %d = f32[4,4]{1,0} dot(%x, %k), lhs_contracting_dims={1}, rhs_contracting_dims={0}
}
"""
  program = parse(text)
  assert [each.opcode for each in program.computations["main"]] == ["parameter", "custom-call", "dot"]
  assert [each.flops for each in products(program)] == [64, 2 * 4 * 8 * 4]


def test_branches_run_in_the_share_that_is_told():
  text = """%yes (x: f32[2]) -> f32[2] {
  ROOT %x = f32[2]{0} parameter(0)
}

%no (x: f32[2]) -> f32[2] {
  ROOT %x = f32[2]{0} parameter(0)
}

ENTRY %main (p: s32[], x: f32[2]) -> f32[2] {
  %p = s32[] parameter(0)
  %x = f32[2]{0} parameter(1)
  ROOT %c = f32[2]{0} conditional(%p, %x, %x), branch_computations={%yes, %no}
}
"""
  assert parse(text).runs == {"main": 1, "yes": 1, "no": 1}
  assert parse(text, branch_share=0.25).runs == {"main": 1, "yes": 0.25, "no": 0.25}


def test_products_and_kernels():
  found = products(parse(LOOPS))
  (dot,) = (each for each in found if not each.kernel)
  assert (dot.flops, dot.runs, dot.passes) == (2 * 4 * 512 * 256, 49, 6)
  (kernel,) = (each for each in found if each.kernel)
  assert (kernel.flops, kernel.runs, kernel.kernel) == (1000, 49, "w")
  assert kernels(parse(LOOPS)) == {"w": 49}
  assert largest_products(found)[0] == ("jit(step)/while/body/dot_general", 49 * 2 * 4 * 512 * 256)


def test_traffic():
  program = parse(LOOPS)
  # Fusion: reads and writes bf16[4,256]. The kernel says 70. The dot reads both and writes f32[4,512].
  layer = 2 * 2048 + 70 + (2048 + 2 * 256 * 512 + 4 * 4 * 512)
  inner = 3 * 32  # a negation that reads from VMEM
  # Every round of a loop calls its condition as often; its fusion writes a flag and reads the state.
  condition = 1 + 4 + 2048 + 32
  comparison = 1 + 4 + 4  # of two numbers, in the condition of the inner loop
  assert hbm_bytes(program) == 49 * (layer + inner + condition) + 49 * 3 * comparison
  assert hbm_bytes_by_operation(program)[0][0] == "dot jit(step)/while/body/dot_general"
  assert [str(sized.array) for sized in largest_arrays(program, 2)] == ["bf16[256,512]", "f32[4,512]"]
  assert [str(sized.array) for sized in arrays_quadratic_in(program, 256)] == ["bf16[256,512]"]
  assert not arrays_quadratic_in(program, 257)


def test_a_cache_is_updated_in_place_and_read_by_the_pages_of_one_layer():
  text = """%write (c: bf16[96,128,8,128], i: s32[2,1], u: bf16[2,128,8,128]) -> bf16[96,128,8,128] {
  %c = bf16[96,128,8,128]{3,2,1,0} parameter(0)
  %i = s32[2,1]{1,0} parameter(1)
  %u = bf16[2,128,8,128]{3,2,1,0} parameter(2)
  ROOT %s = bf16[96,128,8,128]{3,2,1,0} scatter(%c, %i, %u), to_apply=%second
}

ENTRY %main (c: bf16[96,128,8,128], t: s32[3,4]) -> bf16[6,32,128] {
  %c = bf16[96,128,8,128]{3,2,1,0} parameter(0)
  %i = s32[2,1]{1,0:S(1)} parameter(1)
  %u = bf16[2,128,8,128]{3,2,1,0} parameter(2)
  %t = s32[3,4]{1,0:S(1)} parameter(3)
  %new = bf16[96,128,8,128]{3,2,1,0} fusion(%c, %i, %u), kind=kCustom, calls=%write
  ROOT %k = bf16[6,32,128]{2,1,0} custom-call(%t, %new), custom_call_target="tpu_custom_call"
}
"""
  page = 128 * 8 * 128 * 2
  # Two pages are read and written; the kernel reads the 12 that its table names, and writes what it computes.
  assert hbm_bytes(parse(text)) == 2 * page + 2 * page + 12 * page + 6 * 32 * 128 * 2


def test_communication_is_counted_once_and_by_axes():
  found = collectives(parse(COMMUNICATION), MESH)
  kinds = {(each.kind, each.axes): (each.group, each.wire_bytes, str(each.array)) for each in found}
  assert kinds == {
    ("all-gather", "fsdp"): (2, 2 * 256 * 256 / 2, "bf16[256,256]"),
    ("reduce-scatter", "expert"): (2, 4 * 64 / 2, "f32[64]"),
    ("all-gather as all-reduce", "fsdp*expert*context"): (8, 2 * 4 * 64 * 7 / 8, "f32[64]"),
    ("reduce-scatter", "fsdp*expert"): (4, 4 * 64 * 3 / 4, "f32[64]"),
    ("collective-permute", "context"): (2, 4 * 16, "f32[16]"),
  }
  assert next(iter(bytes_by_kind_and_axes(found))) == ("all-gather", "fsdp")


@pytest.mark.parametrize(
  "text, group",
  [
    ("replica_groups={{0,2},{1,3}}", [0, 2]),
    ("replica_groups=[4,2]<=[8]", [0, 1]),
    ("replica_groups=[2,4]<=[2,2,2]T(1,0,2)", [0, 1, 4, 5]),
    ("replica_groups=mesh['a'=2,'b'=2,'c'=2] {'a','c'}", [0, 1, 4, 5]),
    ("replica_groups=mesh['a'=2,'b'=4]<=[4,2]T(1,0) {'b'}", [0, 2, 4, 6]),
    ("to_apply=%add", []),
  ],
)
def test_groups_are_read_in_all_notations(text, group):
  assert first_group(f"channel_id=1, {text}, use_global_device_ids=true") == group


def test_axes_of_groups():
  assert axes_of([0, 1], MESH) == "context" and axes_of([0, 2, 4, 6], MESH) == "fsdp*expert"
  assert axes_of([0, 8], MESH) == axes_of([], MESH) == "?"


def test_a_convolution_that_is_a_batched_product():
  text = """ENTRY %main (a: bf16[2,256,1,64], b: bf16[1,2,128,64]) -> bf16[2,256,2,128] {
  %a = bf16[2,256,1,64]{3,2,1,0} parameter(0)
  %b = bf16[1,2,128,64]{3,2,1,0} parameter(1)
  ROOT %c = bf16[2,256,2,128]{3,2,1,0} convolution(%a, %b), window={size=1x2 pad=0_0x1_1}, dim_labels=0b1f_01oi->0b1f
}
"""
  (product,) = products(parse(text))
  # 256 rows of 64 numbers times [64, 2 · 128], for each of the 2 that the first axis counts.
  assert product.flops == 2 * 2 * 256 * 64 * (2 * 128)


@pytest.mark.parametrize(
  "kernel, result, products_of_scores",
  [
    ("splash_mha_fwd_segmented_residuals.3", "bf16[4,256,128]", 2),
    ("splash_mha_dq_segmented_no_residuals", "bf16[4,256,128]", 3),
    ("splash_mha_dkv_segmented_no_residuals", "(f32[128,128], bf16[2,512,128], bf16[2,512,128])", 4),
    ("splash_mha_dkv_segmented_no_residuals.1", "(bf16[2,4,256,128], bf16[2,512,128], bf16[2,512,128])", 5),
  ],
)
def test_kernels_of_attention_count_half_of_their_scores(kernel, result, products_of_scores):
  """256 queries of 4 heads, the last chunks of a row among them, and 512 keys: causal, so half of the pairs."""
  text = f"""ENTRY %main (q: bf16[4,256,128]) -> bf16[4,256,128] {{
  %table = s32[1,2,4]{{2,1,0}} parameter(3)
  %q = bf16[4,256,128]{{2,1,0}} parameter(0)
  %k = bf16[2,512,128]{{2,1,0}} parameter(1)
  %v = bf16[2,512,128]{{2,1,0}} parameter(2)
  ROOT %{kernel} = {result} custom-call(%table, %q, %k, %v), custom_call_target="tpu_custom_call"
}}
"""
  (product,) = products(parse(text))
  assert product.flops == products_of_scores * 2 * 4 * 256 * 512 * 128 / 2 and product.is_attention


def test_a_kernel_of_all_gradients_is_known_by_its_partial_ones():
  """Also where it goes over rows, here 2: 3 blocks of keys of each have a gradient of all queries."""
  text = """ENTRY %main (q: bf16[2,4,256,128]) -> bf16[2,3,4,256,128] {
  %q = bf16[2,4,256,128]{3,2,1,0} parameter(0)
  %k = bf16[2,2,384,128]{3,2,1,0} parameter(1)
  ROOT %splash_mha_dkv_segmented_no_residuals = (bf16[2,3,4,256,128], bf16[2,2,384,128], bf16[2,2,384,128])
    custom-call(%q, %k, %k), custom_call_target="tpu_custom_call"
}
""".replace("\n    custom", " custom")
  (product,) = products(parse(text))
  assert product.flops == 5 * 2 * 2 * 4 * 256 * 384 * 128 / 2


def test_a_compiled_program_is_read():
  """XLA's own text: two products in a loop of five rounds."""

  def program(x: jax.Array, w: jax.Array) -> jax.Array:
    return jax.lax.scan(lambda x, w: (jnp.tanh(x @ w) @ w, None), x, w)[0]

  shapes = jax.ShapeDtypeStruct((64, 128), jnp.float32), jax.ShapeDtypeStruct((5, 128, 128), jnp.float32)
  found = parse(jax.jit(program).lower(*shapes).compile().as_text())
  assert sum(each.flops * each.runs for each in products(found)) == 5 * 2 * 2 * 64 * 128 * 128
  assert not found.unknown_loops and not collectives(found, {"data": 1})


def test_what_is_no_program_is_refused():
  with pytest.raises(ValueError, match="no program"):
    parse("nothing")


def test_starts_of_asynchronous_operations_count_what_they_move():
  """Their results name the operands again; of a slice the whole array, of which only the slice is read."""
  text = """ENTRY %main (w: f32[48,256,512]) -> f32[16] {
  %w = f32[48,256,512]{2,1,0} parameter(0)
  %x = f32[16]{0} parameter(1)
  %s = ((f32[48,256,512]{2,1,0}), f32[1,256,512]{2,1,0:S(1)}, s32[]{:S(2)}) slice-start(%w), slice={[0:1], [0:256]}
  %c = (f32[16]{0:S(1)}, f32[16]{0}, u32[]{:S(2)}) copy-start(%x)
  %g = (f32[16]{0}, f32[32]{0}) all-gather-start(%x), channel_id=1, replica_groups={{0,1}}, dimensions={0}
  %r = ((f32[16]{0}), f32[8]{0}, u32[]{:S(2)}) reduce-scatter-start(%x), channel_id=2, replica_groups={{0,1}}
  ROOT %a = ((f32[16]{0}), f32[16]{0}) all-to-all-start(%x), channel_id=3, replica_groups={{0,1}}, dimensions={0}
}
"""
  program = parse(text)
  moved = [4 * 256 * 512, 4 * 16, 4 * (16 + 32), 4 * (16 + 8), 4 * (16 + 16)]
  assert hbm_bytes(program) == sum(moved)
  sent = {each.kind: each.wire_bytes for each in collectives(program, {"fsdp": 2})}
  assert sent == {"all-gather": 4 * 32 / 2, "reduce-scatter": 4 * 16 / 2, "all-to-all": 4 * 16 / 2}


def test_rows_that_travel_count_once_whatever_there_is_room_for():
  text = """ENTRY %main (x: f32[16], room: f32[24], n: s32[2]) -> f32[24] {
  %x = f32[16]{0} parameter(0)
  %room = f32[24]{0} parameter(1)
  %n = s32[2]{0} parameter(2)
  ROOT %a = f32[24]{0} ragged-all-to-all(%x, %room, %n, %n, %n, %n), channel_id=1, replica_groups={{0,1}}
}
"""
  (sent,) = collectives(parse(text), {"expert": 2})
  assert (sent.kind, sent.axes, sent.wire_bytes) == ("ragged-all-to-all", "expert", 4 * 16 / 2)
