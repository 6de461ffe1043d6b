"""Names of kernels and operations, and what kind each is."""

import re
from pathlib import Path

import pytest

from megaspec.nn import range_names
from megaspec.profiling.classify import kind_of_kernel, kind_of_operation, kind_on_host
from megaspec.profiling.kinds import (
    ATTENTION,
    COMMUNICATION,
    COPIES,
    ELEMENT_WISE,
    IDLE,
    MATRIX_PRODUCTS,
    OPTIMIZER,
    OTHER,
)

# Names of kernels that no operation is known of, and where each is from. None of these was recorded here.
KERNELS = {
    # cuBLAS on Hopper, as its libraries name them
    "nvjet_tst_128x256_64x4_1x2_h_bz_coopA_NTT": MATRIX_PRODUCTS,
    "sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize128x128x64_warpgroupsize1x1x1_execute_segment_k_off_kernel__5x_"
    "cublas": MATRIX_PRODUCTS,
    "void cublasLt::splitKreduce_kernel<32, 16, int, float, __nv_bfloat16, float, false>(...)": MATRIX_PRODUCTS,
    # CUTLASS: cuBLAS on Ampere, and torch's _grouped_mm and _scaled_mm
    "void cutlass::Kernel2<cutlass_80_tensorop_bf16_s16816gemm_relu_bf16_256x128_32x3_tn_align8>(...)": MATRIX_PRODUCTS,
    "void cutlass::device_kernel<cutlass::gemm::kernel::GemmUniversal<cutlass::gemm::GroupProblemShape<...>>>(...)": (
        MATRIX_PRODUCTS
    ),
    "at::cuda::detail::prepare_grouped_gemm_data<cutlass::bfloat16_t>(...)": MATRIX_PRODUCTS,
    "ampere_bf16_s16816gemm_bf16_128x64_ldg8_f2f_stages_64x4_tn": MATRIX_PRODUCTS,
    # inductor's templates
    "triton_tem_fused_mm_3": MATRIX_PRODUCTS,
    "triton_tem_fused_addmm_relu_0": MATRIX_PRODUCTS,
    # cuDNN, FlashAttention and memory-efficient attention in torch, flex attention by inductor
    "cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16_knob_3_64x128x128_4x1x1_kernel0_0": ATTENTION,
    "cudnn_generated_fort_native_sdpa_sm90_flash_bprop_wgmma_f16_knob_26_64x64x128_1x4x1_kernel0_0": ATTENTION,
    "void pytorch_flash::flash_fwd_kernel<Flash_fwd_kernel_traits<128, cutlass::bfloat16_t>>(...)": ATTENTION,
    "void pytorch_flash::flash_bwd_dq_dk_dv_loop_seqk_parallel_kernel<...cutlass::bfloat16_t...>(...)": ATTENTION,
    "fmha_cutlassF_bf16_aligned_64x64_rf_sm80(...)": ATTENTION,
    "triton_tem_fused_flex_attention_2": ATTENTION,
    "triton_tem_fused_flex_attention_backward_7": ATTENTION,
    # NCCL
    "ncclDevKernel_AllGather_RING_LL(ncclDevKernelArgsStorage<4096ul>)": COMMUNICATION,
    "ncclDevKernel_ReduceScatter_Sum_bf16_RING_LL(ncclDevKernelArgsStorage<4096ul>)": COMMUNICATION,
    "ncclDevKernel_SendRecv(ncclDevKernelArgsStorage<4096ul>)": COMMUNICATION,
    # torch's fused optimizers; kernels/megaspec_kernels/adamw
    "void at::native::(anonymous namespace)::multi_tensor_apply_kernel<at::native::FusedAdamMathFunctor<float, 4>>": (
        OPTIMIZER
    ),
    "adamw_kernel": OPTIMIZER,
    # kernels/megaspec_kernels: cross_entropy, unpermute, attention_merge
    "softmax_stats_kernel": ELEMENT_WISE,
    "softmax_gradient_kernel": ELEMENT_WISE,
    "unpermute_kernel": ELEMENT_WISE,
    "merge_kernel": ATTENTION,
    "add_kernel": ATTENTION,
    # of experts, whose gradients are added to sums by a kernel of another name
    "sum_gradients_kernel": ELEMENT_WISE,
    "group_pairs_kernel": ELEMENT_WISE,
    "group_amax_kernel": ELEMENT_WISE,
    "groups_kernel": ELEMENT_WISE,
    "weighted_bwd_fp8_kernel": ELEMENT_WISE,
    "pairs_kernel": ELEMENT_WISE,
    "lines_kernel": ELEMENT_WISE,
    "amax_of_lines_kernel": ELEMENT_WISE,
    # inductor: pointwise, reduction, persistent reduction
    "triton_poi_fused_mul_silu_4": ELEMENT_WISE,
    "triton_red_fused__to_copy_add_mean_mul_pow_rsqrt_1": ELEMENT_WISE,
    "triton_per_fused_native_layer_norm_backward_2": ELEMENT_WISE,
    # torch's own
    "void at::native::vectorized_elementwise_kernel<4, at::native::CUDAFunctor_add<float>>(...)": ELEMENT_WISE,
    "void at::native::reduce_kernel<512, 1, at::native::ReduceOp<float, at::native::MeanOps<...>>>(...)": ELEMENT_WISE,
    "void at_cuda_detail::cub::DeviceRadixSortOnesweepKernel<...>(...)": ELEMENT_WISE,
    "void at::native::elementwise_kernel<128, 4, at::native::direct_copy_kernel_cuda(...)>": COPIES,
    "void at::native::(anonymous namespace)::CatArrayBatchedCopy<at::native::OpaqueType<2u>>(...)": COPIES,
    "void at::native::vectorized_elementwise_kernel<4, at::native::FillFunctor<float>>(...)": COPIES,
    "Memcpy DtoD (Device -> Device)": COPIES,
    "Memset (Device)": COPIES,
    # nobody's
    "my_own_kernel": OTHER,
}


@pytest.mark.parametrize("name", KERNELS)
def test_a_kernel_of_which_only_the_name_is_known(name):
    assert kind_of_kernel(name, []) == KERNELS[name]


@pytest.mark.parametrize(
    ("name", "around", "of_range", "kind"),
    [
        # the place is stronger than the name
        ("nvjet_x", ["aten::baddbmm"], OPTIMIZER, OPTIMIZER),
        ("nvjet_x", ["aten::bmm", range_names.ATTENTION], ATTENTION, ATTENTION),
        ("void at::native::vectorized_elementwise_kernel", ["aten::add_"], OPTIMIZER, OPTIMIZER),
        ("Memset (Device)", ["aten::mm"], None, MATRIX_PRODUCTS),
        ("my_own_kernel", ["aten::_scaled_dot_product_cudnn_attention_backward"], None, ATTENTION),
        ("void at::native::unrolled_elementwise_kernel<...>", ["aten::copy_", "aten::to"], None, COPIES),
        ("my_own_kernel", ["aten::index_add_"], None, ELEMENT_WISE),
        # messages are messages wherever they are sent
        ("ncclDevKernel_AllReduce_Sum_f64", ["c10d::allreduce_", range_names.OPTIMIZER], OPTIMIZER, COMMUNICATION),
        # a copy into what is sent is a copy
        ("Memcpy DtoD (Device -> Device)", ["c10d::allgather_"], None, COPIES),
        # generated by torch.compile: nothing but its name
        ("triton_poi_fused_mul_silu_4", ["CompiledFunctionBackward"], None, ELEMENT_WISE),
        ("their_kernel", ["theirs::fused", "CompiledFunction"], None, OTHER),
    ],
)  # fmt: skip
def test_a_kernel_in_its_place(name, around, of_range, kind):
    assert kind_of_kernel(name, around, of_range) == kind


@pytest.mark.parametrize(
    ("around", "of_range", "kind"),
    [
        (["aten::mm", "aten::matmul"], None, MATRIX_PRODUCTS),
        (["aten::_softmax", "aten::softmax", range_names.ATTENTION], ATTENTION, ATTENTION),
        (["aten::add_"], OPTIMIZER, OPTIMIZER),
        (["aten::view"], OPTIMIZER, IDLE),
        ([range_names.OPTIMIZER], OPTIMIZER, IDLE),
        (["autograd::engine::evaluate_function: LinearOpBackward"], None, IDLE),
        (["megaspec::add_weight_gradient"], None, IDLE),
        (["## Call CompiledFxGraph fxn72 ##", "CompiledFunction"], None, ELEMENT_WISE),
        (["c10d::allreduce_"], OPTIMIZER, COMMUNICATION),
        (["aten::copy_"], None, COPIES),
        (["theirs::fused"], None, OTHER),
    ],
)
def test_an_operation_on_a_cpu(around, of_range, kind):
    assert kind_on_host(around, of_range) == kind


def test_operations_with_kernels_of_several_kinds_leave_it_to_these():
    for name in ("aten::add", "megaspec::add_weight_gradient", "CompiledFunction", "theirs::mm"):
        assert kind_of_operation(name) is None


ATTENTION_SOURCES = Path(__file__).parents[2] / "kernels" / "megaspec_kernels" / "attention"


def test_each_operation_of_attention_is_known():
    """In compiled code nothing but the operation tells of a package's own kernels that they are of attention."""
    found = []
    for source in ATTENTION_SOURCES.glob("*.py"):
        found += re.findall(r'^@operation\("([^"]+)"', source.read_text(), re.MULTILINE)
    assert "megaspec::te_attention_backward" in found
    for name in found:
        assert kind_of_kernel("transformer_engine::their_kernel", [name]) == ATTENTION, name
