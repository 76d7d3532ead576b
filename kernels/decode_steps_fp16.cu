// decode over a fp16 cache whose parts have steps (batch_invariant): see decode.cuh.
#include "decode.cuh"

FM_DECODE_KERNEL_STEPS(fm_decode_fp16_576_tma_64_steps, __half, 576, Tma, 64)
FM_DECODE_KERNEL_STEPS(fm_decode_fp16_576_gather_64_steps, __half, 576, Gather, 64)
FM_DECODE_KERNEL_STEPS(fm_decode_fp16_512_tma_64_steps, __half, 512, Tma, 64)
FM_DECODE_KERNEL_STEPS(fm_decode_fp16_512_gather_64_steps, __half, 512, Gather, 64)
FM_DECODE_KERNEL_STEPS(fm_decode_fp16_576_tma_32_steps, __half, 576, Tma, 32)
FM_DECODE_KERNEL_STEPS(fm_decode_fp16_576_tma_16_steps, __half, 576, Tma, 16)
FM_DECODE_KERNEL_STEPS(fm_decode_fp16_576_gather_32_steps, __half, 576, Gather, 32)
FM_DECODE_KERNEL_STEPS(fm_decode_fp16_576_gather_16_steps, __half, 576, Gather, 16)
FM_DECODE_KERNEL_STEPS(fm_decode_fp16_512_tma_32_steps, __half, 512, Tma, 32)
FM_DECODE_KERNEL_STEPS(fm_decode_fp16_512_tma_16_steps, __half, 512, Tma, 16)
FM_DECODE_KERNEL_STEPS(fm_decode_fp16_512_gather_32_steps, __half, 512, Gather, 32)
FM_DECODE_KERNEL_STEPS(fm_decode_fp16_512_gather_16_steps, __half, 512, Gather, 16)
