// decode over a bf16 cache whose parts have steps (batch_invariant): see decode.cuh.
#include "decode.cuh"

FM_DECODE_KERNEL_STEPS(fm_decode_bf16_576_tma_64_steps, __nv_bfloat16, 576, Tma, 64)
FM_DECODE_KERNEL_STEPS(fm_decode_bf16_576_gather_64_steps, __nv_bfloat16, 576, Gather, 64)
FM_DECODE_KERNEL_STEPS(fm_decode_bf16_512_tma_64_steps, __nv_bfloat16, 512, Tma, 64)
FM_DECODE_KERNEL_STEPS(fm_decode_bf16_512_gather_64_steps, __nv_bfloat16, 512, Gather, 64)
FM_DECODE_KERNEL_STEPS(fm_decode_bf16_576_tma_32_steps, __nv_bfloat16, 576, Tma, 32)
FM_DECODE_KERNEL_STEPS(fm_decode_bf16_576_tma_16_steps, __nv_bfloat16, 576, Tma, 16)
FM_DECODE_KERNEL_STEPS(fm_decode_bf16_576_gather_32_steps, __nv_bfloat16, 576, Gather, 32)
FM_DECODE_KERNEL_STEPS(fm_decode_bf16_576_gather_16_steps, __nv_bfloat16, 576, Gather, 16)
FM_DECODE_KERNEL_STEPS(fm_decode_bf16_512_tma_32_steps, __nv_bfloat16, 512, Tma, 32)
FM_DECODE_KERNEL_STEPS(fm_decode_bf16_512_tma_16_steps, __nv_bfloat16, 512, Tma, 16)
FM_DECODE_KERNEL_STEPS(fm_decode_bf16_512_gather_32_steps, __nv_bfloat16, 512, Gather, 32)
FM_DECODE_KERNEL_STEPS(fm_decode_bf16_512_gather_16_steps, __nv_bfloat16, 512, Gather, 16)
