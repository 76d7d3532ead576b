// decode over a fp16 cache: see decode.cuh.
#include "decode.cuh"

FM_DECODE_KERNEL(fm_decode_fp16_576_tma_64, __half, 576, Tma, 64)
FM_DECODE_KERNEL(fm_decode_fp16_576_gather_64, __half, 576, Gather, 64)
FM_DECODE_KERNEL(fm_decode_fp16_512_tma_64, __half, 512, Tma, 64)
FM_DECODE_KERNEL(fm_decode_fp16_512_gather_64, __half, 512, Gather, 64)
FM_DECODE_KERNEL(fm_decode_fp16_576_tma_32, __half, 576, Tma, 32)
FM_DECODE_KERNELS(fm_decode_fp16_576_gather_32, __half, 576, Gather, 32)
FM_DECODE_KERNEL(fm_decode_fp16_512_tma_32, __half, 512, Tma, 32)
FM_DECODE_KERNELS(fm_decode_fp16_512_gather_32, __half, 512, Gather, 32)
FM_DECODE_KERNELS(fm_decode_fp16_576_tma_16, __half, 576, Tma, 16)
FM_DECODE_KERNELS(fm_decode_fp16_576_gather_16, __half, 576, Gather, 16)
FM_DECODE_KERNELS(fm_decode_fp16_512_tma_16, __half, 512, Tma, 16)
FM_DECODE_KERNELS(fm_decode_fp16_512_gather_16, __half, 512, Gather, 16)
